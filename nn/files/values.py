"""Values in files: one tensor of a file, or several put together; a part of any is read without the rest.

A model may hold in one tensor what its files hold in many, as the experts of a layer. Such a value is a small tree of
where its elements are:

    Concatenated(dim 0)                        a part is asked for by a region, a range of indices a dim:
      Unsqueezed  FileTensor experts.0.w1          each node hands on what of the region is its children's,
      Unsqueezed  FileTensor experts.1.w1          and a FileTensor reads that and no more
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ...placement.errors import DtypeError

__all__ = [
    "Concatenated", "FileTensor", "FileValue", "Narrowed", "OpenFiles", "Region", "Transposed", "Unsqueezed", "whole",
]  # fmt: skip

T = TypeVar("T")
Region: TypeAlias = tuple[tuple[int, int], ...]  # of each dim the first index and the one behind the last


class OpenFiles(Protocol):
    """Files that are open, of which a region of a tensor is read."""

    def read(self, of: "FileTensor", region: Region) -> Tensor: ...


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
        part = files.read(self, region)
        out.copy_(part)
        if _narrower(out.dtype, self.dtype) and _overflowed(part, out.dtype):
            high = torch.finfo(out.dtype).max
            raise DtypeError(
                f"flow.load: {self.name} has numbers that {out.dtype} does not hold\n"
                f"  it is {self.dtype} in {self.file}, with numbers beyond {high:g}, the largest of {out.dtype}\n"
                f"  make the model of {self.dtype}, as by model.to({self.dtype})"
            )

    def tensors(self) -> Iterator["FileTensor"]:
        yield self


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


FileValue: TypeAlias = FileTensor | Concatenated | Narrowed | Transposed | Unsqueezed


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
