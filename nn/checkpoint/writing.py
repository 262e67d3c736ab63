"""Writing: the files of one process, with the bytes of tensors as they lie in memory, and their checksums on the way.

    8 bytes   the length of the header
    header    JSON of safetensors: names, dtypes, shapes, places; under __metadata__ where in its tensor each piece is,
              as torch.distributed.checkpoint writes it, and so reads it
    data      pieces, of the widest elements first, so that each begins at a multiple of its width

A file has one piece of a tensor at most, as torch.distributed.checkpoint expects it; the next of the same tensor goes
to the next file.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..files.checksums import BITS, checksum
from ..files.headers import NAMES
from ..files.pieces import sizes_of
from ..files.raw import memory_of, wrote
from ..files.values import Region
from .entries import NamedTensor
from .manifest import WrittenPiece

__all__ = ["FilePlan", "PlannedPiece", "planned_files", "write_file"]

BLOCK = 4 << 20  # bytes of which the checksum is made, and which are then written out of the cache


@dataclass(frozen=True, slots=True)
class PlannedPiece:
    """A piece, and where in its file it will begin. Its numbers are asked for when it is written."""

    entry: NamedTensor
    region: Region
    at: int
    numbers: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        size = self.entry.layout.dtype.itemsize
        for lo, hi in self.region:
            size *= hi - lo
        return size


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file that is to be written."""

    name: str
    header: bytes
    pieces: tuple[PlannedPiece, ...]

    @property
    def size(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)


def planned_files(
    process: int, pieces: Iterable[tuple[NamedTensor, Region, Callable[[], Tensor]]], *, before: int = 0
) -> list[FilePlan]:
    """The files of a process; so many were planned before these."""
    files: list[list[tuple[NamedTensor, Region, Callable[[], Tensor]]]] = []
    last: dict[str, int] = {}
    for piece in pieces:
        at = last[piece[0].name] = last.get(piece[0].name, -1) + 1
        files.extend([] for _ in range(at + 1 - len(files)))
        files[at].append(piece)
    return [_file(f"{process:05d}-{number:03d}.safetensors", each) for number, each in enumerate(files, before)]


def _file(name: str, held: Sequence[tuple[NamedTensor, Region, Callable[[], Tensor]]]) -> FilePlan:
    held = sorted(held, key=lambda piece: (-piece[0].layout.dtype.itemsize, piece[0].name))
    offsets = {entry.name: {"saved_offsets": [lo for lo, _ in region]} for entry, region, _ in held}
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    planned, end = [], 0
    for entry, region, numbers in held:
        piece = PlannedPiece(entry, region, end, numbers)
        planned.append(piece)
        of = {"dtype": NAMES[entry.layout.dtype], "shape": list(sizes_of(region))}
        header[entry.name] = {**of, "data_offsets": [end, end + piece.nbytes]}
        end += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return FilePlan(name, len(text).to_bytes(8, "little") + text, tuple(planned))


def write_file(folder: Path, plan: FilePlan) -> list[WrittenPiece]:
    """Write a file and have the disk keep it; returns the pieces with their checksums."""
    fd = os.open(folder / plan.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        wrote(fd, plan.header)
        written = [
            WrittenPiece(
                piece.entry.name, plan.name, len(plan.header) + piece.at, piece.region, _write(fd, piece, plan.name)
            )
            for piece in plan.pieces
        ]
        os.fsync(fd)
    finally:
        os.close(fd)
    return written


def _write(fd: int, piece: PlannedPiece, file: str) -> int:
    part, shape, total = piece.numbers(), piece.entry.layout.shape, 0
    rows = max(1, BLOCK // max(1, piece.nbytes // max(1, part.shape[0]))) if part.ndim else 1
    for at in range(0, part.shape[0] if part.ndim else 1, rows):
        block = part[at : at + rows] if part.ndim else part
        block = block.cpu().contiguous().resolve_conj().resolve_neg()
        offsets = [lo for lo, _ in piece.region]
        if offsets:
            offsets[0] += at
        total += checksum(block, offsets, shape)
        wrote(fd, memory_of(block))
    return total % (1 << BITS)
