"""Checksums that add up: those of all parts of a tensor, in whatever parts it is read, give that of the whole.

    sum over all words of  bits * (index * (index + 1) + 1)   modulo 2**64

A word is an element, or 4 bytes of one that has more; its bits are a signed number, its index is that in the whole
tensor, row by row. A factor is odd, so that no change of one word is lost, and differs by place, so that elements that
changed places show. Factors grow by squares: added up over a power of two, those that grow evenly have so many zeros
behind them that a million ones would pass for zeros.
"""

import threading
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["BITS", "checksum"]

BITS = 64
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by width
ROWS, COLUMNS = 512, 256  # of blocks of words that stay in a cache
LONG, FEW = 4 * COLUMNS, 64  # so long runs are added up one by one, if there are not many


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
        words = part.dtype.itemsize // bits.itemsize
        if words > 1:
            offsets = (*offsets[:-1], offsets[-1] * words) if shape else (0,)
            shape = (*shape[:-1], shape[-1] * words) if shape else (words,)
        for rows, starts in _rows(bits, offsets, shape):
            total += _sum(rows, starts) if isinstance(starts, Tensor) else _long(rows, starts)
    return total % (1 << BITS)


def _bits(part: Tensor) -> Tensor:
    width = part.dtype.itemsize
    if width not in INTS:
        raise TypeError(f"elements of {width} bytes, as {part.dtype} has them")
    whole = part.resolve_conj().resolve_neg()
    whole = whole.reshape(1) if width == 8 and not whole.ndim else whole
    return (whole if whole.stride()[-1:] in ((), (1,)) else whole.contiguous()).view(INTS[width])


def _rows(bits: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[Tensor, Tensor | int]]:
    """Matrices whose rows are runs of neighbours, and the index of each row's first element; or a long run, and its."""
    d = bits.ndim
    while d > 0 and (d == bits.ndim or bits.shape[d] == shape[d]):
        d -= 1
    outer, run = bits.shape[:d], prod(bits.shape[d:])  # dims behind `d` are whole, so that it is one run with them
    steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
    first = torch.tensor(offsets[d] * steps[d] if shape else 0, device="cpu")
    for i in range(d):
        first = first.unsqueeze(-1) + (torch.arange(outer[i], device="cpu") + offsets[i]) * steps[i]
    starts = first.reshape(-1)
    if run > LONG and len(starts) < FEW:
        lines = bits.reshape(-1, run)
        yield from zip(lines, starts.tolist(), strict=True)
        return
    matrix = bits.reshape(-1, run)
    for lo in range(0, run, LONG):
        some = matrix[:, lo : lo + LONG]
        many = max(1, ROWS * COLUMNS // some.shape[1])
        yield from zip(torch.split(some, many), torch.split(starts + lo, many), strict=True)


class _Memory(threading.local):
    """Memory in which a thread adds up: what is made anew for each block takes half of the time."""

    def __init__(self) -> None:
        self.block = torch.empty(ROWS * COLUMNS, dtype=torch.float64, device="cpu")
        self.places = torch.arange(LONG, device="cpu")
        # In double, because the default may have too few digits for places.
        self.ones = torch.ones(max(ROWS, LONG), dtype=torch.float64, device="cpu")
        self.factors = torch.stack([self.ones[:LONG], self.places.double()])  # for sums of a row, and those by place


_memory = _Memory()


def _sum(rows: Tensor, starts: Tensor) -> int:
    """Of rows whose first elements have these indices.

    Within a block sums are of less than 53 bits, which floats have exactly, and products of matrices are fast.
    """
    fits = rows.numel() <= ROWS * COLUMNS
    room = _memory.block if fits else torch.empty(rows.numel(), dtype=torch.float64, device="cpu")
    numbers = room[: rows.numel()].view(rows.shape).copy_(rows)
    return _of_sums(_memory.factors[:, : rows.shape[1]] @ numbers.t(), numbers.sum(0), starts)


def _long(line: Tensor, start: int) -> int:
    """Of a long run, in rows that are added up a block at a time."""
    count = len(line) // COLUMNS
    matrix, rest = line[: count * COLUMNS].view(count, COLUMNS), line[count * COLUMNS :]
    sums = torch.empty(2, count, dtype=torch.float64, device="cpu")
    down = torch.zeros(COLUMNS, dtype=torch.float64, device="cpu")
    room, factors = _memory.block.view(ROWS, COLUMNS), _memory.factors[:, :COLUMNS]
    for at in range(0, count, ROWS):
        rows = matrix[at : at + ROWS]
        numbers = room[: len(rows)].copy_(rows)
        sums[:, at : at + ROWS] = factors @ numbers.t()
        down.addmv_(numbers.t(), _memory.ones[: len(rows)])
    total = _of_sums(sums, down, torch.arange(start, start + count * COLUMNS, COLUMNS, device="cpu"))
    return total + (_sum(rest.view(1, -1), torch.tensor([start + count * COLUMNS], device="cpu")) if len(rest) else 0)


def _of_sums(rows: Tensor, down: Tensor, starts: Tensor) -> int:
    """A checksum from sums of rows that begin at s, and of columns c. The factor of s + c is s(s + 1) + 1, 2sc and c(c
    + 1)."""
    across, along = rows.long().unbind()
    places = _memory.places[: len(down)]
    whole = (starts * (starts + 1) + 1) * across + 2 * starts * along
    return int(whole.sum()) + int((down.long() * places * (places + 1)).sum())
