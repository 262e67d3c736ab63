"""The bytes that no boxing can do without, from who holds and who needs each element: the oracle that judges routes.

For one element let H be the ranks that hold (a term of) it, p the number of terms to be added and D the ranks that need
it. Any schedule makes at least

    |D without H|                      transfers where p = 1
    (p-1) + |D| - [D meets H]          where p > 1: p-1 merges make the first whole copy, every other needer hears of it

so the busiest rank receives at least max(largest own need, all transfers / ranks). A partial axis that stays partial
makes separate problems; one that becomes partial needs the value on any one of its ranks. Between different placements
that are both partial, addends may stay as they are in ways this does not count, so the bound there is 0.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod

from ...placement.errors import SbpError
from ...sbp import Layout
from ...sbp.state import Spans

__all__ = ["least_sent", "lower_bound"]


def lower_bound(src: Layout, dst: Layout) -> float:
    """Bytes that the busiest rank must receive to get from one layout to the other, on any placements."""
    own, total = _needs(src, dst)
    ranks = set(src.placement.flat) | set(dst.placement.flat)
    return max(max(own.values(), default=0), total / len(ranks)) * src.dtype.itemsize


def least_sent(src: Layout, dst: Layout) -> int:
    """Bytes that all ranks must send together to get from one layout to the other."""
    return _needs(src, dst)[1] * src.dtype.itemsize


def _needs(src: Layout, dst: Layout) -> tuple[dict[int, int], int]:
    """Elements that each rank must receive, and that all must send."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise SbpError(f"a bound is between layouts of one tensor\n  {src}\n  {dst}")
    if src.placement is not dst.placement and src.state.partial and dst.state.partial:
        return {}, 0
    ranks = set(src.placement.flat) | set(dst.placement.flat)
    total = 0
    own = dict.fromkeys(ranks, 0)
    for holders, needers, size in _problems(src, dst):
        terms = len(holders)
        everywhere = set().union(*holders)
        for options in needers:
            wanting = options if len(options) == 1 or terms > 1 else [r for r in options if r in everywhere] or options
            rank = wanting[0]
            if len(options) == 1 and (terms > 1 or rank not in everywhere):
                own[rank] += size
        met = any(r in everywhere for options in needers for r in options)
        if terms > 1:
            total += size * (terms - 1 + len(needers) - met)
        else:
            total += size * sum(not everywhere.intersection(options) for options in needers)
    return own, total


def _problems(src: Layout, dst: Layout) -> Iterator[tuple[list[set[int]], list[list[int]], int]]:
    """For each box of elements treated alike: the holders of each term, the choices of each needer, the box's size."""
    same = src.placement is dst.placement and src.state.reduction == dst.state.reduction
    kept = tuple(a for a in src.state.partial if same and a in dst.state.partial)
    have = {r: src.spans(r) for r in src.placement.flat}
    need = {r: dst.spans(r) for r in dst.placement.flat}
    cells = [_cells(d, n, have, need) for d, n in enumerate(src.shape)]
    for at in product(*cells):
        size = prod(hi - lo for lo, hi in at)
        hold = [r for r in have if _holds(have[r], at)]
        want = [r for r in need if _holds(need[r], at)]
        for fixed in product(*(range(src.placement.shape[a]) for a in kept)):
            here = [r for r in hold if _at(src, r, kept) == fixed]
            there = [r for r in want if _at(dst, r, kept) == fixed]
            yield _grouped(src, here, src.state.partial), _choices(dst, there, kept), size


def _at(layout: Layout, rank: int, axes: tuple[int, ...]) -> tuple[int, ...]:
    where = layout.placement.coords(rank)
    return tuple(where[a] for a in axes)


def _grouped(layout: Layout, ranks: list[int], axes: tuple[int, ...]) -> list[set[int]]:
    terms: dict[tuple[int, ...], set[int]] = {}
    for r in ranks:
        terms.setdefault(_at(layout, r, axes), set()).add(r)
    return list(terms.values())


def _choices(layout: Layout, ranks: list[int], kept: tuple[int, ...]) -> list[list[int]]:
    """The needers; ranks along an axis that becomes partial are one needer, served at any of them."""
    made = [a for a in layout.state.partial if a not in kept]
    others = tuple(a for a in range(layout.placement.ndim) if a not in made)
    return [sorted(group) for group in _grouped(layout, ranks, others)]


def _cells(dim: int, size: int, *sides: dict[int, tuple[Spans, ...]]) -> list[tuple[int, int]]:
    cuts = {0, size}.union(x for side in sides for held in side.values() for span in held[dim] for x in span)
    ends = sorted(cuts)
    return list(pairwise(ends))


def _holds(held: tuple[Spans, ...], box: tuple[tuple[int, int], ...]) -> bool:
    return all(any(lo <= b[0] and b[1] <= hi for lo, hi in spans) for spans, b in zip(held, box, strict=True))
