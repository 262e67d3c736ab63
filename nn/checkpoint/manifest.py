"""The manifest of a checkpoint: what it holds, in which files, and with which checksums; a folder is good by having it.

step-100/manifest.json            written last, so that it is there only if all else is
step-100/00000-000.safetensors    pieces that process 0 wrote; second pieces of a tensor are in 00000-001
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...placement.errors import FileError, some_of
from ..files.headers import DTYPES
from ..files.pieces import sizes_of
from ..files.values import Pieced, Region, StoredPiece
from .trees import Json

__all__ = ["MANIFEST", "NAMES", "Manifest", "WrittenPiece", "is_checkpoint", "read_manifest"]

MANIFEST = "manifest.json"
VERSION = 1
KIND = "sbpflow checkpoint"
PARTS = "tied", "modules", "optimizers", "states", "extra", "random"
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A box of a tensor as one process has written it."""

    name: str
    file: str
    at: int
    region: Region
    sum: int

    def json(self) -> Json:
        return [self.file, self.at, [[lo, hi] for lo, hi in self.region], f"{self.sum:016x}"]


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint in a folder. `said` is all of it, as JSON has it."""

    folder: Path
    said: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.said["step"])

    @property
    def plan(self) -> str | None:
        """The text of the plan by which the run was."""
        plan = self.said["plan"]
        return None if plan is None else str(plan)

    @property
    def saved_at(self) -> int:
        """Nanoseconds of the clock of who wrote it."""
        return int(self.said["saved_at"])

    @property
    def files(self) -> Mapping[str, int]:
        """The bytes of each file."""
        return self.said["files"]  # type: ignore[no-any-return]

    @cached_property
    def tensors(self) -> dict[str, Pieced]:
        """All tensors, by their names."""
        advice = partial(_advice, str(self.folder))
        return {name: self._tensor(name, said, advice) for name, said in self.said["tensors"].items()}

    def _tensor(self, name: str, said: Any, advice: Any) -> Pieced:
        pieces = [
            StoredPiece(str(self.folder / file), at, tuple((lo, hi) for lo, hi in region), int(sum_, 16))
            for file, at, region, sum_ in said["pieces"]
        ]
        return Pieced(name, tuple(said["shape"]), DTYPES[said["dtype"]], tuple(pieces), advice)

    def wrong(self) -> str | None:
        """Why its files are not those that were written, by their sizes and headers; None where they are."""
        missing = [file for file in self.files if not (self.folder / file).is_file()]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            return f"{some_of(missing)} of {len(self.files)} files {verb} missing"
        for file, size in self.files.items():
            there = (self.folder / file).stat().st_size
            if there != size:
                return f"{file} has {there} bytes, and was written with {size}"
        return next((wrong for file, held in self._held().items() if (wrong := self._header(file, held))), None)

    def _held(self) -> dict[str, dict[str, tuple[Any, Any, int]]]:
        """Of each file the dtype, sizes and place of what it holds."""
        found: dict[str, dict[str, tuple[Any, Any, int]]] = {file: {} for file in self.files}
        for name, of in self.tensors.items():
            for piece in of.pieces:
                held = NAMES[of.dtype], list(sizes_of(piece.region)), piece.at
                found[Path(piece.file).name][name] = held
        return found

    def _header(self, file: str, held: Mapping[str, tuple[Any, Any, int]]) -> str | None:
        try:
            with (self.folder / file).open("rb") as open_file:
                size = int.from_bytes(open_file.read(8), "little")
                said = json.loads(open_file.read(min(size, self.files[file])))
            found = {
                name: (part["dtype"], part["shape"], 8 + size + part["data_offsets"][0])
                for name, part in said.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, LookupError) as error:
            return f"{file} has no header of safetensors: {type(error).__name__}: {error}"
        other = next((name for name in {**found, **held} if found.get(name) != held.get(name)), None)
        return f"{file} has other tensors than were written to it, such as {other}" if other else None

    def check(self) -> "Manifest":
        """Raise if its files are not those that were written."""
        wrong = self.wrong()
        if wrong is not None:
            raise FileError(
                f"flow.load: {self.folder} is no whole checkpoint\n  {wrong}\n  {_advice(str(self.folder))}"
            )
        return self


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """That of a folder, or an error that says why it cannot be read."""
    path = folder / MANIFEST
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        if said["kind"] != KIND:
            raise ValueError(f"it is a {said['kind']!r}")
        version = said["version"]
        made = Manifest(folder, said)
        if version == VERSION:
            _ = made.step, made.plan, made.saved_at, made.files, [said[name] for name in PARTS]
            _check(made.tensors.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise FileError(
            f"flow.load: {path} is no manifest of a checkpoint\n"
            f"  found {type(error).__name__}: {error}\n  {_advice(str(folder))}"
        ) from error
    if version != VERSION:
        raise FileError(
            f"flow.load: {path} is of version {version}, and this sbpflow reads version {VERSION}\n"
            f"  it was saved by sbpflow {said.get('sbpflow')}\n  install the one that it was saved by"
        )
    return made


def _check(tensors: Iterable[Pieced]) -> None:
    """That pieces make up the tensors that they are of."""
    for of in tensors:
        inside = all(
            len(piece.region) == len(of.shape)
            and all(0 <= lo <= hi <= size for (lo, hi), size in zip(piece.region, of.shape, strict=True))
            for piece in of.pieces
        )
        if not inside or not of.pieces or sum(prod(sizes_of(p.region)) for p in of.pieces) != prod(of.shape):
            raise ValueError(f"the pieces of {of.name} {of.shape} are not all of it")


def _advice(folder: str) -> str:
    """The fix for a checkpoint that is not what was written: the newest good one that was saved before it."""
    path = Path(folder)
    found: list[Manifest] = []
    for other in path.parent.iterdir() if path.parent.is_dir() else ():
        if other.name == path.name or not is_checkpoint(other):
            continue
        try:
            found.append(read_one(other))
        except FileError:
            continue
    found.sort(key=lambda each: each.saved_at)
    mine = _saved_at(path)
    older = [each for each in found if mine is None or each.saved_at < mine]
    good = next((each for each in reversed(older) if each.wrong() is None), None)
    if good is None:
        return "copy it again from where it was saved; no other whole checkpoint lies beside it"
    return f"copy it again, or load the one before: {good.folder} of step {good.step}"


def _saved_at(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["saved_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_one(folder: Path) -> Manifest:
    """A manifest of a neighbour, for which nobody asked."""
    said = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return Manifest(folder, said)


def made_manifest(
    pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype, list[WrittenPiece]]],
    files: Mapping[str, int],
    said: Mapping[str, Json],
) -> dict[str, Json]:
    """The JSON of a checkpoint whose tensors have these shapes, dtypes and pieces."""
    tensors: dict[str, Json] = {
        name: {"shape": list(shape), "dtype": NAMES[dtype], "pieces": [piece.json() for piece in of]}
        for name, (shape, dtype, of) in pieces.items()
    }
    return {"kind": KIND, "version": VERSION, **said, "files": dict(files), "tensors": tensors}
