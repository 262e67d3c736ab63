"""Raw bytes of tensors in files: written one behind the other, read by their offsets, and counted.

    with traffic() as bytes:
        flow.save("runs/a/step-100", model)
    print(bytes.written)

A run of neighbours goes by one call of the system straight into memory. Where runs are short, as those of columns are,
the file is mapped, and the system brings whole pages of it.
"""

import mmap
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...placement.errors import FileError
from .pieces import sizes_of
from .values import Region

__all__ = ["RawFile", "Traffic", "counted", "memory_of", "traffic", "wrote"]

LONG = 32 << 10  # bytes of a run that is worth a call of its own


@dataclass
class Traffic:
    """Bytes of tensors and headers that this process has read and written, and of files that others have or want."""

    read: int = 0
    written: int = 0
    received: int = 0
    sent: int = 0


_counting: list[Traffic] = []
_lock = threading.Lock()


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what is read and written until the block ends, also by threads."""
    mine = Traffic()
    _counting.append(mine)
    try:
        yield mine
    finally:
        _counting[:] = [each for each in _counting if each is not mine]


def counted(*, read: int = 0, written: int = 0, received: int = 0, sent: int = 0) -> None:
    if _counting:
        with _lock:
            for each in _counting:
                each.read += read
                each.written += written
                each.received += received
                each.sent += sent


def memory_of(part: Tensor) -> memoryview:
    """The bytes of a tensor on the host that lies row by row without gaps."""
    if not part.numel():
        return memoryview(b"")
    flat = part.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def wrote(fd: int, data: memoryview | bytes) -> None:
    """Write all of it where the file stands."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    counted(written=len(data))


class RawFile:
    """A file that is read by offsets; its size was looked at before."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise FileError(
                f"flow.load: {path} cannot be read: {error.strerror}\n"
                f"  it was named by {Path(path).parent}\n  copy all files of the folder"
            ) from error
        self.mapped: Tensor | None = None

    def close(self) -> None:
        self.mapped = None
        os.close(self.fd)

    def bytes(self, at: int, out: memoryview) -> None:
        """So many bytes from an offset."""
        done, size = 0, len(out)
        while done < size:
            got = os.preadv(self.fd, [out[done:]], at + done)
            if not got:
                raise FileError(
                    f"flow.load: {self.path} ends at byte {at + done}, and is longer by its header\n"
                    "  it was cut off\n  copy it again, or load another checkpoint: flow.newest(folder) names one"
                )
            done += got
        counted(read=size)

    def box(self, at: int, sizes: Sequence[int], region: Region, out: Tensor) -> None:
        """The elements in a region of a tensor of these sizes that begins at an offset, into memory without gaps."""
        if not out.numel():
            return
        width, d = out.dtype.itemsize, len(sizes)
        while d > 0 and region[d - 1] == (0, sizes[d - 1]):
            d -= 1
        d = max(d - 1, 0)  # of this dim some, and behind it all: one run
        inner = prod(sizes[d + 1 :])
        run = (region[d][1] - region[d][0]) * inner * width if sizes else width
        outer = prod(sizes_of(region[:d]))
        if outer == 1 or run >= LONG:
            memory = memory_of(out)
            for number, first in enumerate(_starts(sizes, region, d)):
                self.bytes(at + first * width, memory[number * run : (number + 1) * run])
            return
        out.copy_(self.map()[at : at + prod(sizes) * width].view(out.dtype).view(tuple(sizes))[_slices(region)])
        counted(read=out.nbytes)

    def map(self) -> Tensor:
        """All of the file's bytes."""
        if self.mapped is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that nobody may write to it, and nobody does
                held = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
                self.mapped = torch.frombuffer(held, dtype=torch.uint8)
        return self.mapped


def _starts(sizes: Sequence[int], region: Region, d: int) -> Iterator[int]:
    """The index of the first element of each run."""
    steps = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    firsts = [region[d][0] * steps[d] if sizes else 0]
    for i in range(d):
        firsts = [first + at * steps[i] for first in firsts for at in range(*region[i])]
    yield from firsts


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region)
