"""The commit of a checkpoint: written aside, and given its name when all of it is on the disk.

    step-100.writing/   files of all processes, then the manifest      a crash here leaves the last good one alone
    step-100/           by one rename; one that was there is moved away first, and removed behind it

The first process does what is done once. Processes tell each other over their store, from whatever thread writes.
"""

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from ...placement.errors import FileError, SbpError
from ..files.headers import DTYPES, NAMES
from ..files.pieces import sizes_of
from ..files.raw import wrote
from .content import Content
from .folders.ownership import begun, described, is_empty, is_own, removed, synced, unmarked
from .manifest import MANIFEST, REPLACED, WRITING, WrittenPiece, made_manifest
from .meeting import Meeting
from .newest import tidied
from .trees import Json
from .writing import FilePlan, write_file

__all__ = [
    "SLOW", "begin_folder", "check_alike", "committed", "dumped", "gathered_manifest", "raise_told", "renamed",
    "write_manifest", "written_files",
]  # fmt: skip

SLOW = 10e6  # bytes a second of the slowest disk that is waited for


def committed(
    path: Path, content: Content, files: Sequence[FilePlan], keep: int | None, meeting: Meeting, limit: float
) -> None:
    """Write what this process has to, and have the checkpoint stand when all have."""
    aside = path.with_name(path.name + WRITING)
    size = sum(file.size for file in files)
    said = dumped(path=path.name, alike=content.alike, plain=content.plain, size=size)
    error: Exception | None = None
    try:
        most = int(meeting.agree(said, decide=lambda each: _begin(path, aside, each)))
        meeting.limit = limit + most / SLOW
        try:
            said = written_files(aside, content, files)
        except Exception as failure:
            error = failure
        try:
            meeting.agree(said, error, lambda each: _end(path, aside, content, each, keep))
        finally:
            meeting.end()
    except Exception as failure:
        if meeting.me == 0:
            removed(aside)
        raise_told(failure, path)


def raise_told(failure: Exception, path: Path) -> NoReturn:
    """An error of the disk in the words of the house, and any other as it is."""
    if isinstance(failure, OSError) and not isinstance(failure, FileError):
        raise FileError(
            f"flow.save: {path} could not be written: {failure}\n"
            "  an earlier checkpoint is as it was\n  make room, or have the disk writable, or save to another"
        ) from failure
    raise failure


def written_files(aside: Path, content: Content, files: Sequence[FilePlan]) -> str:
    """Write what this process has to; what it tells the first of it."""
    pieces = [piece for file in files for piece in write_file(aside, file)]
    shapes = {e.name: [list(e.layout.shape), NAMES[e.layout.dtype]] for e in content.entries}
    here = {piece.name for piece in pieces}
    return dumped(
        pieces=[[piece.name, *_list(piece)] for piece in pieces],
        shapes={name: of for name, of in shapes.items() if name in here},
        files={file.name: file.size for file in files},
        states=content.states,
        random=content.random,
    )


def _list(piece: WrittenPiece) -> list[Any]:
    found = piece.json()
    assert isinstance(found, list)
    return found


def dumped(**said: Any) -> str:
    return json.dumps(said, separators=(",", ":"))


def _begin(path: Path, aside: Path, each: Sequence[str]) -> str:
    """All save the same, and there is an empty folder for it; the bytes of who has most."""
    most = check_alike(each)
    begin_folder(path, aside)
    return most


def check_alike(each: Sequence[str]) -> str:
    """Refuse processes that are to save different things; the bytes of who has most to write, whom all wait for."""
    rows = [json.loads(said) for said in each]
    _same({f"rank {rank}": {"path": row["path"], **row["alike"]} for rank, row in enumerate(rows)})
    known: dict[str, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for name, number in row["plain"].items():
            first, of = known.setdefault(name, (rank, number))
            if of != number:
                raise SbpError(
                    f"flow.save: ranks {first} and {rank} have different numbers in {name}\n"
                    "  it is a plain tensor, which all ranks are to have alike\n"
                    "  make it global, as by flow.from_local, or the same everywhere"
                )
    return str(max(row["size"] for row in rows))


def begin_folder(path: Path, aside: Path) -> None:
    """An empty folder beside where the checkpoint will be."""
    there = path.resolve()  # what a link names
    if path.exists() and not is_own(there) and not is_empty(there):
        raise FileError(
            f"flow.save: {path} is there, and is no checkpoint\n  it is {described(there)}, which would be lost\n"
            f"  name a folder for this one checkpoint, such as {path / 'step-100'}"
        )
    begun(aside, (_old(path),) if _goes(path) else ())


def _goes(path: Path) -> bool:
    """Whether there is a folder that the new one replaces; of a link only the link goes, and not what it names."""
    return path.exists() and not path.is_symlink()


def _old(path: Path) -> Path:
    return path.with_name(path.name + REPLACED)


def _same(said: Mapping[str, Mapping[str, Any]]) -> None:
    (first, one), *others = said.items()
    for rank, other in others:
        for name in one:
            mine, theirs, at = one[name], other[name], name
            while isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys() and mine:
                key = next((key for key in mine if mine[key] != theirs[key]), None)
                if key is None:
                    break
                mine, theirs, at = mine[key], theirs[key], f"{at}.{key}"
            if mine != theirs:
                raise SbpError(
                    f"flow.save: {first} and {rank} are to save different things under {at}\n"
                    f"  {str(mine)[:100]} and {str(theirs)[:100]}\n"
                    "  pass the same on every rank; what each has of its own goes in a global tensor"
                )


def _end(path: Path, aside: Path, content: Content, each: Sequence[str], keep: int | None) -> str:
    """All is written: the manifest, and then the name."""
    manifest = gathered_manifest(content, [json.loads(said) for said in each])
    write_manifest(aside, manifest)
    renamed(aside, path)
    if keep is not None:
        tidied(path, keep)
    return ""


def gathered_manifest(content: Content, rows: Sequence[dict[str, Any]], **more: Json) -> dict[str, Json]:
    """The JSON of what all have written. One piece that several have written counts once, with copies."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, list[WrittenPiece]]] = {}
    files: dict[str, int] = {}
    states: dict[str, Any] = {}
    for rank, row in enumerate(rows):
        files |= row["files"]
        _merge(states, row["states"], rank)
        for name, file, at, region, total in row["pieces"]:
            shape, dtype = row["shapes"][name]
            piece = WrittenPiece(name, file, at, tuple((lo, hi) for lo, hi in region), int(total, 16))
            tensors.setdefault(name, (tuple(shape), DTYPES[dtype], []))[2].append(piece)
    copies = {name: _apart(name, pieces) for name, (*_, pieces) in tensors.items()} if "hosts" in more else {}
    _check_all(tensors)
    said = {
        "sbpflow": _version(),
        **content.alike,
        "processes": len(rows),
        "states": states,
        "random": [row["random"] for row in rows],
        **more,
    }
    return made_manifest(tensors, files, said, copies)


def _apart(name: str, pieces: list[WrittenPiece]) -> list[Json]:
    """Take those that were written before out of the list; of each the number of the first, its file and place."""
    first: dict[object, int] = {}
    once: list[WrittenPiece] = []
    copies: list[Json] = []
    for piece in pieces:
        at = first.setdefault(piece.region, len(once))
        if at == len(once):
            once.append(piece)
            continue
        if once[at].sum != piece.sum:
            where = ", ".join(f"{lo}:{hi}" for lo, hi in piece.region)
            raise SbpError(
                f"flow.save: hosts have different numbers in {name} [{where}]\n"
                f"  by the checksums of {once[at].file} and {piece.file}, which are to be alike\n"
                "  replicas have drifted apart; flow.load of an older checkpoint makes them alike again"
            )
        copies.append([at, piece.file, piece.at])
    pieces[:] = once
    return copies


def write_manifest(aside: Path, manifest: Json) -> None:
    _write(aside / MANIFEST, json.dumps(manifest).encode())
    synced(aside)


def renamed(aside: Path, path: Path) -> None:
    """Give a folder that is whole its name; one that has it goes."""
    unmarked(aside)
    old = _old(path)
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        removed(old)
        path.rename(old)
    aside.rename(path)
    synced(path.parent)
    removed(old)


def _merge(states: dict[str, Any], more: Mapping[str, Any], rank: int) -> None:
    for name, tree in more.items():
        if states.setdefault(name, tree) != tree:
            raise SbpError(
                f"flow.save: rank {rank} has another state of the optimizer for {name} than ranks before it\n"
                f"  {str(tree)[:200]} and {str(states[name])[:200]}\n  every rank is to make the same steps"
            )


def _check_all(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype, list[WrittenPiece]]]) -> None:
    for name, (shape, _, pieces) in tensors.items():
        found = sum(prod(sizes_of(piece.region)) for piece in pieces)
        if found != prod(shape):
            raise SbpError(
                f"flow.save: {found} of {prod(shape)} numbers of {name} {shape} were written\n"
                "  ranks have it in other layouts than they told each other\n  make the same calls on every rank"
            )


def _write(path: Path, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        wrote(fd, text)
        os.fsync(fd)
    finally:
        os.close(fd)


def _version() -> str:
    try:
        return version("sbpflow")
    except PackageNotFoundError:
        return "a checkout"
