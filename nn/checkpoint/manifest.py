"""The manifest of a checkpoint: what it holds, in which files, and with which checksums; a folder is good by having it.

step-100/manifest.json            written last, so that it is there only if all else is
step-100/00000-000.safetensors    pieces that process 0 wrote; second pieces of a tensor are in 00000-001
"""

import json
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from ...placement.errors import FileError, some_of
from ..files.headers import DTYPES, NAMES
from ..files.served import REMOTE
from ..files.values import Pieced, Region, StoredPiece
from .folders.manifest_fields import ODD, checked_fields
from .folders.ownership import KIND, MANIFEST, REPLACED, WRITING
from .trees import Json

__all__ = [
    "MANIFEST", "REPLACED", "WRITING", "Manifest", "WrittenPiece", "is_checkpoint", "made_manifest", "manifest_of",
    "read_manifest",
]  # fmt: skip

VERSION = 1
_known = 0  # the latest `saved_at` of those that this process has read or made


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
    places: Mapping[str, str] | None = None  # where files are that hosts have apart, of other hosts by URLs

    def __post_init__(self) -> None:
        global _known
        _known = max(_known, self.saved_at)

    @property
    def step(self) -> int:
        return self.said["step"]  # type: ignore[no-any-return]

    @property
    def plan(self) -> str | None:
        """The text of the plan by which the run was."""
        plan = self.said["plan"]
        return None if plan is None else str(plan)

    @property
    def saved_at(self) -> int:
        """Nanoseconds of the clock of who wrote it."""
        return self.said["saved_at"]  # type: ignore[no-any-return]

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
            StoredPiece(*self._place(files), tuple((lo, hi) for lo, hi in region), int(sum_, 16))
            for files, (*_, region, sum_) in zip(_written(said), said["pieces"], strict=True)
        ]
        return Pieced(name, tuple(said["shape"]), DTYPES[said["dtype"]], tuple(pieces), advice)

    def _place(self, files: Sequence[tuple[str, int]]) -> tuple[str, int]:
        """The file that is read for a piece, and where in it: one that is here if there is one."""
        if self.places is None:
            return str(self.folder / files[0][0]), files[0][1]
        there = [(self.places[file], at) for file, at in files if file in self.places]
        return min(there, key=lambda of: of[0].startswith(REMOTE))

    def lost(self, files: Container[str]) -> set[str]:
        """The files that have pieces of which none of these has a copy."""
        held = [each for said in self.said["tensors"].values() for each in _written(said)]
        return {each[0][0] for each in held if not any(file in files for file, _ in each)}

    def present(self) -> list[str]:
        """The files in its folder that are as they were written."""
        held = self._held()
        return [
            file
            for file, size in self.files.items()
            if (path := self.folder / file).is_file() and path.stat().st_size == size
            and self._header(file, held[file]) is None
        ]  # fmt: skip

    def wrong(self) -> str | None:
        """Why its files are not those that were written, by their sizes and headers; None where they are."""
        if self.places is not None:
            return None  # each host has looked at its own
        try:
            return self._wrong()
        except OSError as error:  # another process removes it, such as by keep=
            return f"{type(error).__name__}: {error}"

    def _wrong(self) -> str | None:
        missing = [file for file in self.files if not (self.folder / file).is_file()]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            apart = "; hosts have them apart, and neighbours=1 finds them" if "hosts" in self.said else ""
            return f"{some_of(missing)} of {len(self.files)} files {verb} missing{apart}"
        for file, size in self.files.items():
            there = (self.folder / file).stat().st_size
            if there != size:
                return f"{file} has {there} bytes, and was written with {size}"
        return next((wrong for file, held in self._held().items() if (wrong := self._header(file, held))), None)

    def _held(self) -> dict[str, dict[str, tuple[Any, Any, int]]]:
        """Of each file the dtype, sizes and place of what it holds."""
        found: dict[str, dict[str, tuple[Any, Any, int]]] = {file: {} for file in self.files}
        for name, said in self.said["tensors"].items():
            for files, (*_, region, _) in zip(_written(said), said["pieces"], strict=True):
                for file, at in files:
                    found[file][name] = said["dtype"], [hi - lo for lo, hi in region], at
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
        except (OSError, *ODD) as error:
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


def _written(said: Mapping[str, Any]) -> list[list[tuple[str, int]]]:
    """Of each piece of a tensor the files that have it, and where."""
    found = [[(file, at)] for file, at, *_ in said["pieces"]]
    for number, file, at in said.get("copies", ()):
        found[number].append((file, at))
    return found


def is_checkpoint(folder: Path) -> bool:
    try:
        return (folder / MANIFEST).is_file()
    except OSError as error:
        raise FileError(f"flow.load: {folder} cannot be read: {error}\n  make it readable for this process") from error


def read_manifest(folder: Path) -> Manifest:
    """That of a folder, or an error that says why it cannot be read."""
    try:
        return manifest_of(folder, (folder / MANIFEST).read_bytes())
    except FileError:
        raise
    except (OSError, *ODD) as error:
        raise FileError(
            f"flow.load: {folder / MANIFEST} is no manifest of a checkpoint\n"
            f"  found {type(error).__name__}: {error}\n  {_advice(str(folder))}"
        ) from error


def manifest_of(folder: Path, text: bytes) -> Manifest:
    """That of a text, wherever it was read; one that is odd in any way is an error that names the field."""
    said = json.loads(text.decode("utf-8"))
    kind = said.get("kind") if isinstance(said, dict) else None
    if kind != KIND:
        raise ValueError(f"it is a {kind if kind is not None else said!r:.60}, and no {KIND}")
    version = said.get("version")
    if type(version) is not int:
        raise ValueError(f"its version is {version!r:.60}, and is to be a whole number")
    if version != VERSION:
        raise FileError(
            f"flow.load: {folder / MANIFEST} is of version {version}, and this sbpflow "
            f"reads version {VERSION}\n"
            f"  it was saved by sbpflow {said.get('sbpflow')!s:.60}\n  install the one that it was saved by"
        )
    if said.get("sum") != _sum(said):
        raise ValueError("it was changed: its checksum is another")
    checked_fields(said)
    return Manifest(folder, said)


def _sum(said: Mapping[str, Any]) -> str:
    """The checksum of a manifest, without that itself."""
    text = json.dumps({name: of for name, of in said.items() if name != "sum"}, sort_keys=True)
    return f"{crc32(text.encode()):08x}"


def _advice(folder: str) -> str:
    """The fix for a checkpoint that is not what was written: the newest good one that was saved before it."""
    path, mine = Path(folder), _saved_at(Path(folder))
    try:
        others = [other for other in path.parent.iterdir() if other.name != path.name]
    except OSError:
        others = []
    known = [(at, other) for other in others if (at := _saved_at(other)) is not None and (mine is None or at < mine)]
    for _, other in sorted(known, reverse=True):
        try:
            found = manifest_of(other, (other / MANIFEST).read_bytes())
        except (OSError, *ODD):
            continue
        if found.wrong() is None:
            return f"copy it again, or load the one before: {other} of step {found.step}"
    return "copy it again from where it was saved; no other whole checkpoint lies beside it"


def _saved_at(folder: Path) -> int | None:
    try:
        found = json.loads((folder / MANIFEST).read_bytes())["saved_at"]
    except (OSError, *ODD):
        return None
    return found if type(found) is int else None


def made_manifest(
    pieces: Mapping[str, tuple[tuple[int, ...], torch.dtype, list[WrittenPiece]]],
    files: Mapping[str, int],
    said: Mapping[str, Json],
    copies: Mapping[str, list[Json]] = {},
) -> dict[str, Json]:
    """The JSON of a checkpoint whose tensors have these shapes, dtypes and pieces."""
    tensors: dict[str, Json] = {
        name: {"shape": list(shape), "dtype": NAMES[dtype], "pieces": [piece.json() for piece in of]}
        for name, (shape, dtype, of) in pieces.items()
    }
    for name, of in copies.items():
        if of:
            tensors[name] = {**tensors[name], "copies": of}  # type: ignore[dict-item]
    global _known
    _known = max(time.time_ns(), _known + 1)  # behind those that it goes on from, though a clock was put back
    made: dict[str, Json] = {"kind": KIND, "version": VERSION, **said, "saved_at": _known}
    made |= {"files": dict(files), "tensors": tensors}
    return {**made, "sum": _sum(made)}
