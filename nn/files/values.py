"""Values in files: one tensor of a file, or several put together; a part of any is read without the rest.

A model may hold in one tensor what its files hold in many, such as the experts of a layer. Such a value is a small
tree of where its elements are:

    Concatenated(dim 0)                        a part is asked for by a region, a range of indices a dim:
      Unsqueezed  FileTensor experts.0.w1          each node hands on what of the region is its children's,
      Unsqueezed  FileTensor experts.1.w1          and a FileTensor reads that and no more
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...placement.errors import DtypeError

__all__ = [
    "Concatenated", "FileTensor", "FileValue", "Narrowed", "OpenFiles", "StoredPiece", "Pieced", "Region", "Transposed",
    "Unsqueezed", "converted", "whole",
]  # fmt: skip

T = TypeVar("T")
Region: TypeAlias = tuple[tuple[int, int], ...]  # of each dim the first index and the one behind the last


class OpenFiles(Protocol):
    """Files that are open, of which a region of a tensor is read."""

    def read(self, of: "FileTensor", region: Region) -> Tensor: ...

    def fill_pieces(self, of: "Pieced", out: Tensor, region: Region) -> None: ...


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file, under its name there."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        """Read a region into `out`, which is of its shape and of any dtype that can hold the numbers."""
        if not out.numel():
            return
        converted(out, files.read(self, region), self.name, self.file)

    def tensors(self) -> Iterator["FileTensor"]:
        yield self


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, row by row from a byte of a file on, and the checksum of that."""

    file: str
    at: int
    region: Region
    sum: int


@dataclass(frozen=True, slots=True)
class Pieced:
    """A tensor that several processes have written, each its pieces. `advice` says what else could be loaded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]
    advice: Callable[[], str] = field(compare=False)

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        if out.numel():
            files.fill_pieces(self, out, region)

    def tensors(self) -> Iterator[FileTensor]:
        yield FileTensor(self.pieces[0].file, self.name, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Concatenated:
    """Values one behind the other along a dim."""

    parts: tuple["FileValue", ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return _put(first, self.dim, sum(part.shape[self.dim] for part in self.parts))

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        low, high = region[self.dim]
        end = 0
        for part in self.parts:
            start, end = end, end + part.shape[self.dim]
            lo, hi = max(low, start), min(high, end)
            if lo < hi:
                piece = out.narrow(self.dim, lo - low, hi - lo)
                part.fill(piece, _put(region, self.dim, (lo - start, hi - start)), files)

    def tensors(self) -> Iterator[FileTensor]:
        for part in self.parts:
            yield from part.tensors()


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Some indices of a dim of a value, from `low`."""

    of: "FileValue"
    dim: int
    low: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return _put(self.of.shape, self.dim, self.size)

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        low, high = region[self.dim]
        self.of.fill(out, _put(region, self.dim, (self.low + low, self.low + high)), files)

    def tensors(self) -> Iterator[FileTensor]:
        return self.of.tensors()


@dataclass(frozen=True, slots=True)
class Transposed:
    """A value with two of its dims in each other's place."""

    of: "FileValue"
    dims: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        return _swap(self.of.shape, *self.dims)

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        self.of.fill(out.transpose(*self.dims), _swap(region, *self.dims), files)

    def tensors(self) -> Iterator[FileTensor]:
        return self.of.tensors()


@dataclass(frozen=True, slots=True)
class Unsqueezed:
    """A value with one dim more, of size 1."""

    of: "FileValue"
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.of.shape[: self.dim], 1, *self.of.shape[self.dim :])

    def fill(self, out: Tensor, region: Region, files: OpenFiles) -> None:
        if out.numel():  # an empty part of the new dim is no part of the value
            self.of.fill(out.squeeze(self.dim), region[: self.dim] + region[self.dim + 1 :], files)

    def tensors(self) -> Iterator[FileTensor]:
        return self.of.tensors()


FileValue: TypeAlias = FileTensor | Pieced | Concatenated | Narrowed | Transposed | Unsqueezed


def converted(out: Tensor, part: Tensor, name: str, file: str) -> None:
    """Put numbers of a file's tensor into memory of any dtype that can hold them."""
    out.copy_(part)
    if _narrower(out.dtype, part.dtype) and _overflowed(part, out.dtype):
        high = torch.finfo(out.dtype).max
        raise DtypeError(
            f"flow.load: {name} has numbers that {out.dtype} does not hold\n"
            f"  it is {part.dtype} in {file}, with numbers beyond {high:g}, the largest of {out.dtype}\n"
            f"  make the model of {part.dtype}, as by model.to({part.dtype})"
        )


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is all of a value.

    >>> whole((2, 3))
    ((0, 2), (0, 3))
    """
    return tuple((0, size) for size in shape)


def _narrower(to: torch.dtype, given: torch.dtype) -> bool:
    """Whether a floating dtype has smaller numbers only than another."""
    return to.is_floating_point and given.is_floating_point and torch.finfo(to).max < torch.finfo(given).max


def _overflowed(part: Tensor, to: torch.dtype) -> bool:
    """Whether a number is beyond those of a dtype; infinity is none. Least and largest come first, without memory."""
    numbers, high = part.float() if part.dtype.itemsize == 1 else part, torch.finfo(to).max
    least, largest = numbers.aminmax()
    if bool(least >= -high) and bool(largest <= high):
        return False
    return bool((numbers.isfinite() & (numbers.abs() > high)).any())


def _put(row: tuple[T, ...], at: int, entry: T) -> tuple[T, ...]:
    return (*row[:at], entry, *row[at + 1 :])


def _swap(row: tuple[T, ...], a: int, b: int) -> tuple[T, ...]:
    found = list(row)
    found[a], found[b] = row[b], row[a]
    return tuple(found)
