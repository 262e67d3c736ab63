"""The elements that ranks need and do not hold: what a move has to send."""

from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from math import lcm, prod

import numpy as np

from ...sbp.state import Factors, extent, overlap, pieces, spans

__all__ = ["missing", "truly_missing"]


@lru_cache(maxsize=1 << 14)
def missing(
    shape: tuple[int, ...], have: tuple[Factors, ...], need: tuple[Factors, ...], sizes: tuple[int, ...]
) -> float:
    """Elements that the worst placed rank needs and does not hold, for splits without remainder."""
    local = kept = 1.0
    for size, f, g in zip(shape, have, need, strict=True):
        local *= extent(size, g, sizes)
        kept *= size * _kept(f, g, sizes)
    return max(0.0, local - kept)


def truly_missing(
    shape: tuple[int, ...], have: tuple[Factors, ...], need: tuple[Factors, ...], sizes: tuple[int, ...]
) -> int:
    """The same with remainders, rank by rank."""
    moving = {a for f, g in zip(have, need, strict=True) if f != g for a in f + g}
    most = 0
    for where in product(*(range(n if a in moving else 1) for a, n in enumerate(sizes))):
        local = kept = 1
        for size, f, g in zip(shape, have, need, strict=True):
            wanted = spans(size, g, where, sizes)
            local *= sum(hi - lo for lo, hi in wanted)
            kept *= sum(n for _, _, n in overlap(spans(size, f, where, sizes), wanted))
        most = max(most, local - kept)
    return most


@lru_cache(maxsize=1 << 14)
def _kept(have: Factors, need: Factors, sizes: tuple[int, ...]) -> float:
    """The fraction of a dim that the worst placed rank both holds and needs."""
    short, long = sorted((have, need), key=len)
    if long[: len(short)] == short:
        return 1 / pieces(long, sizes)
    if all(f >= 0 for f in have + need):
        return 0.0  # first piece of one cut, last of another: some rank holds nothing of what it needs
    axes = sorted({f for f in have + need if f >= 0})
    cells = lcm(_cells(have, sizes), _cells(need, sizes))
    worst = cells
    for at in product(
        *({0, min(1, sizes[a] - 1), sizes[a] - 1} for a in axes)
    ):  # the extremes are at the ends of an axis
        where = dict(zip(axes, at, strict=True))
        worst = min(worst, int((_held(have, where, sizes, cells) & _held(need, where, sizes, cells)).sum()))
    return worst / cells


def _cells(factors: Factors, sizes: tuple[int, ...]) -> int:
    """In how many pieces all factors cut a dim."""
    return prod(sizes[f] if f >= 0 else -f for f in factors)


def _held(
    factors: Factors, where: Mapping[int, int], sizes: tuple[int, ...], cells: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """The cells of a dim, of so many, that the rank at these coordinates holds."""
    held = np.zeros([sizes[f] if f >= 0 else -f for f in factors], dtype=np.bool_)
    held[tuple(where[f] if f >= 0 else slice(None) for f in factors)] = True
    return np.repeat(held.reshape(-1), cells // held.size)
