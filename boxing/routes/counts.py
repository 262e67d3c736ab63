"""Counts of the elements that each rank receives in a move, without the boxes that go: there may be thousands of ranks.

Ranks of a group that hold the same count once, as do those that need the same.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from ...sbp import Layout
from ...sbp.state import Spans, nth_part, overlap
from .moves import LOCAL, Move
from .program import sources_of

__all__ = ["received_by_rank"]


def received_by_rank(move: Move) -> dict[int, int]:
    """Elements that a move brings to each rank; a rank that is left out gets none.

    >>> from ...placement import default_cluster, placement
    >>> from ...sbp import layout
    >>> from .moves import moves
    >>> p = placement("cpu:[0-2]")
    >>> a, b = layout(p, "S(0)", (4,)), layout(p, "B", (4,))
    >>> [received_by_rank(move) for move in moves(a, b, default_cluster(p))]
    [{0: 2, 1: 3, 2: 3}]
    """
    src, dst = move.src, move.dst
    if move.kind in LOCAL:
        return {}
    if move.kind == "transfer":
        return {rank: _transferred(src, dst, rank, at) for at, rank in enumerate(dst.placement.flat)}
    found: dict[int, int] = {}
    for group in src.placement.groups(move.axes):
        if move.kind in ("all_reduce", "all_reduce_once"):
            found.update((rank, _summed(move, group, at)) for at, rank in enumerate(group))
        else:
            found.update(_exchanged(src, dst, group))
    return found


def _summed(move: Move, group: Sequence[int], at: int) -> int:
    """All others' addends of what this rank sums; and, where each sums a piece, the sums of the others."""
    numel = prod(move.src.local_shape(group[at]))
    if move.kind == "all_reduce_once":
        return numel * (len(group) - 1)
    lo, hi = nth_part(0, numel, at, len(group))
    return (hi - lo) * (len(group) - 1) + numel - (hi - lo)


def _exchanged(src: Layout, dst: Layout, group: Sequence[int]) -> dict[int, int]:
    """Elements that each of a group needs of those that all others have."""
    have, need = ({rank: of.spans(rank) for rank in group} for of in (src, dst))
    many = Counter(have.values())
    whole = {there: sum(n * _shared(here, there) for here, n in many.items()) for there in {*need.values()}}
    return {rank: whole[need[rank]] - _shared(have[rank], need[rank]) for rank in group}


def _transferred(src: Layout, dst: Layout, rank: int, at: int) -> int:
    need = dst.spans(rank)
    return sum(_shared(src.spans(other), need) for other in sources_of(src, rank, at) if other != rank)


def _shared(have: tuple[Spans, ...], need: tuple[Spans, ...]) -> int:
    return prod(map(_length, have, need))


@lru_cache(maxsize=1 << 16)
def _length(have: Spans, need: Spans) -> int:
    return sum(length for _, _, length in overlap(have, need))
