"""Even moves: how much each rank receives where all hold as much, in closed form; no rank is asked for that."""

from math import prod
from typing import NamedTuple

from ...sbp import Layout
from ...sbp.state import Factors, drop
from .moves import LOCAL, Move

__all__ = ["Received", "received_evenly"]


class Received(NamedTuple):
    """Elements that come in: to the busiest rank, to all together, and whether every rank is as busy."""

    most: int
    total: int
    alike: bool


def received_evenly(move: Move) -> Received | None:
    """Elements that a move brings to each rank, where all hold as much as each other, before it and after it.

    None where they do not, or where it depends on the rank, as in an exchange of pieces that overlap.

    >>> from ...placement import default_cluster, placement
    >>> from ...sbp import layout
    >>> from .moves import moves
    >>> p = placement("cpu:[0-3]")
    >>> a, b = layout(p, "S(0)", (8, 8)), layout(p, "B", (8, 8))
    >>> [received_evenly(move) for move in moves(a, b, default_cluster(p))]
    [Received(most=48, total=192, alike=True)]
    """
    src, dst = move.src, move.dst
    ranks = src.placement.size
    if move.kind in LOCAL:
        return Received(0, 0, True)
    if move.kind == "transfer":  # to other ranks: all that each is to have
        apart = dst.even and set(src.placement.flat).isdisjoint(dst.placement.flat)
        return _alike(_numel(dst), dst.placement.size) if apart else None
    if not (src.even and dst.even):
        return None
    group = prod(src.placement.shape[a] for a in move.axes)
    here, there = _numel(src), _numel(dst)
    if move.kind == "all_reduce":  # each sums its piece, and all pieces are gathered
        piece = -(-here // group)
        total = 2 * here * (group - 1) * (ranks // group)
        return Received(piece * (group - 2) + here, total, here % group == 0)
    if move.kind == "all_reduce_once":
        return _alike(here * (group - 1), ranks)
    axes, before, after = frozenset(move.axes), src.state.dims, dst.state.dims
    if move.kind == "reduce_scatter" and axes <= {*src.state.partial} and _dropped(dst, axes) == before:
        return _alike(there * (group - 1), ranks)
    if move.kind == "all_gather" and axes <= src.state.split and _dropped(src, axes) == after:
        return _alike(there - here, ranks)
    turned = _dropped(src, axes) == _dropped(dst, axes) and len(axes) == 1
    if move.kind == "all_to_all" and turned and _cut(before, move.axes[0]) != _cut(after, move.axes[0]):
        return _alike(there // group * (group - 1), ranks)
    return None


def _alike(each: int, ranks: int) -> Received:
    return Received(each, each * ranks, True)


def _numel(of: Layout) -> int:
    return prod(of.local_shape(of.placement.flat[0]))


def _dropped(of: Layout, axes: frozenset[int]) -> tuple[Factors, ...]:
    return tuple(drop(factors, axes, of.placement.shape) for factors in of.state.dims)


def _cut(dims: tuple[Factors, ...], axis: int) -> list[int]:
    return [d for d, factors in enumerate(dims) if axis in factors]
