"""Checksums that add up: those of all parts of a tensor, in whatever parts it is read, give that of the whole.

    sum over all elements of  bits * (2 * index + 1)   modulo 2**64

The bits of an element are an unsigned number of its width, its index is that in the whole tensor, row by row. A factor
is odd, so that no change of one element is lost, and differs by place, so that elements that changed places show.
"""

import threading
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["BITS", "checksum"]

BITS = 64
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by width; torch adds up no others unsigned
MASKS = {2: 0xFFFF, 4: 0xFFFFFFFF}
SIDE = 256  # of squares of elements that stay in a cache: 3 GB/s of float32 on one core, and half of that without


def checksum(part: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """That of a box of a tensor of this shape, which begins at these indices.

    >>> whole = torch.arange(6.0).reshape(2, 3)
    >>> left, right = checksum(whole[:, :2], (0, 0), (2, 3)), checksum(whole[:, 2:], (0, 2), (2, 3))
    >>> (left + right) % 2**64 == checksum(whole, (0, 0), (2, 3))
    True
    """
    if not part.numel():
        return 0
    total = 0
    with torch.no_grad():
        bits = _bits(part.detach())
        for rows, starts in _rows(bits, offsets, shape):
            total += _sum(rows, starts)
    return total % (1 << BITS)


def _bits(part: Tensor) -> Tensor:
    width = part.dtype.itemsize
    if width not in INTS:
        raise TypeError(f"elements of {width} bytes, as {part.dtype} has them")
    whole = part if part.is_complex() or part.stride()[-1:] in ((), (1,)) else part.contiguous()
    return whole.resolve_conj().resolve_neg().view(INTS[width]) if whole.dtype is not torch.bool else _bytes(whole)


def _bytes(part: Tensor) -> Tensor:
    return part.view(torch.uint8)


def _rows(bits: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices whose rows are runs of neighbours, and the index of each row's first element."""
    d = bits.ndim
    while d > 0 and (d == bits.ndim or bits.shape[d] == shape[d]):
        d -= 1
    outer, run = bits.shape[:d], prod(bits.shape[d:])  # dims behind `d` are whole, so that it is one run with them
    steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
    first = torch.tensor(offsets[d] * steps[d] if shape else 0)
    for i in range(d):
        first = first.unsqueeze(-1) + (torch.arange(outer[i]) + offsets[i]) * steps[i]
    starts = first.reshape(-1)
    if run > SIDE * 4:
        lines = bits.reshape(-1, run) if bits.is_contiguous() else bits.flatten(0, max(d - 1, 0)) if d else bits
        for at, start in enumerate(starts.tolist()):
            yield from _folded(lines[at].reshape(-1) if d else bits.reshape(-1), start)
        return
    matrix = bits.reshape(-1, run)
    many = max(1, SIDE * SIDE // max(run, 1))
    yield from zip(torch.split(matrix, many), torch.split(starts, many), strict=True)


def _folded(line: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A long run in squares."""
    square = SIDE * SIDE
    for at in range(0, len(line), square):
        some = line[at : at + square]
        whole = len(some) // SIDE * SIDE
        if whole:
            yield some[:whole].view(-1, SIDE), start + at + torch.arange(0, whole, SIDE)
        if whole < len(some):
            yield some[whole:].view(1, -1), torch.tensor([start + at + whole])


class _Memory(threading.local):
    """Memory of a thread to sum in: memory that is made anew for each square takes half of the time."""

    def __init__(self) -> None:
        self.square = torch.empty(SIDE * SIDE, dtype=torch.int64)
        self.places = torch.arange(SIDE * 4)


_memory = _Memory()


def _sum(rows: Tensor, starts: Tensor) -> int:
    numbers, mask = rows, MASKS.get(rows.itemsize)
    if rows.dtype is not torch.int64:  # of which sums and products wrap around, as they are to
        room = _memory.square if rows.numel() <= SIDE * SIDE else torch.empty(rows.numel(), dtype=torch.int64)
        numbers = room[: rows.numel()].view(rows.shape).copy_(rows)
    if mask is not None:
        numbers.bitwise_and_(mask)
    across, down = numbers.sum(1), numbers.sum(0)
    places = _memory.places[: rows.shape[1]]
    return int((starts.mul(2).add_(1).mul_(across)).sum()) + 2 * int(down.mul_(places).sum())
