"""The reach of windows, as a rule says it, and what of it lies beyond the ends of a tensor.

places   -1  0  1  2  3  4  5  6         a kernel of 3 with padding 1 on 6 places, over 2 ranks
rank 0    .  *  *  *  +                  three results: sees one place before the first, one of its neighbour
rank 1             +  *  *  *  .         and one behind the last
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...call import LocalFunction, Match, Piece
from ...state import Window

__all__ = ["is_split", "margins", "padded", "per_dim", "seen_by"]


def seen_by(match: Match, windows: Mapping[int, Window], near: LocalFunction, at: int = 0) -> Match:
    """The match of an op that sees these dims of an input through windows; ranks run `near` on what they see."""
    sizes, found = list(match.sizes), {}
    for dim, window in windows.items():
        factor = match.inputs[at][dim]
        sizes[factor], found[at, factor] = window.size, window
    return replace(match, sizes=tuple(sizes), windows=found, near=near)


def per_dim(said: int | Sequence[int], count: int) -> list[int]:
    """An argument with a number for each dim, which may be said once for all."""
    if isinstance(said, int):
        return [said] * count
    return list(said) * count if len(said) == 1 else list(said)


def is_split(piece: Piece, dim: int) -> bool:
    """Whether a rank has a part of a dim of the result."""
    return piece.out_spans(0, dim) != ((0, piece.outputs[0].shape[dim]),)


def margins(piece: Piece, dim: int, window: Window, at: int = 0) -> tuple[int, int]:
    """The number of places that a rank's windows see and it lacks, before its part of a dim and behind it.

    Negative where what it has goes on behind all windows.
    """
    ((lo, hi),) = piece.out_spans(0, dim)
    first, end = lo * window.step + window.first, (hi - 1) * window.step + window.last + 1
    held = piece.spans(at, dim)
    return (held[0][0] - first, end - held[0][1]) if held else (end - first, 0)


def padded(x: Tensor, around: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """A tensor with so many places more before and behind each of its last dims, or fewer."""
    if not any(map(any, around)):
        return x
    sizes = x.shape[x.ndim - len(around) :]
    inside = [_within(pair, size) for pair, size in zip(around, sizes, strict=True)]
    return torch.constant_pad_nd(x, [n for pair in reversed(inside) for n in pair], value)


def _within(around: tuple[int, int], size: int) -> tuple[int, int]:
    """The same without taking away more places than there are; torch takes from one end before it adds at the other.

    >>> _within((-1, 2), 4), _within((-6, 4), 4), _within((3, -5), 4)
    ((-1, 2), (-4, 2), (2, -4))
    """
    before, behind = max(around[0], -size), max(around[1], -size)
    return before + around[1] - behind, behind + around[0] - before
