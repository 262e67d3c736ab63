"""Survivors: the part of a tensor's layout that is left without some ranks, and still has all of the tensor. Pure.

(data=2, tensor=2), split along tensor      rank 3 is lost
    0  1                                    0  1      the first row has both halves
    2  x                                    2  .      or, where more is lost, a rank of each half, wherever it is
"""

from collections.abc import Collection
from itertools import product

from ..placement import Placement
from ..sbp import Layout, State

__all__ = ["survivors"]


def survivors(of: Layout, lost: Collection[int]) -> Layout | None:
    """A tensor's layout on the ranks that are not lost, in the shards that these have; None where a part is gone.

    As many of its copies are kept as lie in a grid.
    """
    where, state = of.placement, State(of.state.dims, of.state.partial, of.state.reduction)
    gone = [rank for rank in where.flat if rank in lost and all(of.spans(rank))]  # one that has nothing is no loss
    if not gone:
        return Layout(where, state, of.shape, of.dtype)
    copied = [axis for axis in range(where.ndim) if axis not in state.split and axis not in state.partial]
    kept = _without(where, gone, copied)
    flat = None if kept is None else tuple(where.flat[_number(where, at)] for at in product(*kept))
    shape = where.shape if kept is None else tuple(map(len, kept))
    if flat is None:
        shape = tuple(1 if axis in copied else size for axis, size in enumerate(where.shape))
        flat = _one_of_each(where, {*gone}, copied)
    return None if flat is None else Layout(Placement(where.type, flat, shape, where.names), state, of.shape, of.dtype)


def _without(where: Placement, gone: Collection[int], copied: Collection[int]) -> list[list[int]] | None:
    """The coordinates on each axis that leave out some ranks, where only copies are left out."""
    kept = [list(range(size)) for size in where.shape]
    for rank in gone:
        at = where.coords(rank)
        if any(at[axis] not in kept[axis] for axis in copied):
            continue
        axis = max(copied, key=lambda axis: len(kept[axis]), default=None)
        if axis is None or len(kept[axis]) == 1:
            return None
        kept[axis].remove(at[axis])
    return kept


def _one_of_each(where: Placement, gone: Collection[int], copied: Collection[int]) -> tuple[int, ...] | None:
    """For each part of the tensor a rank that has it."""
    spans = [range(1) if axis in copied else range(size) for axis, size in enumerate(where.shape)]
    found = []
    for part in product(*spans):
        copies = product(*(range(where.shape[axis]) if axis in copied else [at] for axis, at in enumerate(part)))
        ranks = [where.flat[_number(where, at)] for at in copies]
        alive = next((rank for rank in ranks if rank not in gone), None)
        if alive is None:
            return None
        found.append(alive)
    return tuple(found)


def _number(where: Placement, at: tuple[int, ...]) -> int:
    number = 0
    for size, coordinate in zip(where.shape, at, strict=True):
        number = number * size + coordinate
    return number
