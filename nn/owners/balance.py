"""Owners of matrices: on the ranks that hold them, so that all have as much to do."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from ...placement import Placement
from ...sbp import Layout, State

__all__ = ["cost", "owners", "shared_out", "whole_on"]


def cost(shape: Sequence[int]) -> int:
    """Multiplications of a product of a matrix with itself, which such steps consist of; of a vector its elements.

    >>> cost((4, 10)), cost((10,)), cost((2, 3, 5))
    (160, 10, 60)
    """
    rows = shape[0] if shape else 1
    columns = prod(shape[1:])
    return rows * columns * min(rows, columns)


@lru_cache(64)
def owners(held: tuple[tuple[Placement, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """The owner of each tensor, by its place and shape: the dearest first, to who has the least so far.

    >>> from ...placement import placement
    >>> p = placement("cpu:[0-1]")
    >>> owners(((p, (2, 2)), (p, (4, 4)), (p, (3, 4)), (p, (9,))))
    (1, 0, 1, 1)
    """
    return shared_out([(where, cost(shape)) for where, shape in held])


def shared_out(held: Sequence[tuple[Placement, int]]) -> tuple[int, ...]:
    """The rank of each thing, by its places and weight: the heaviest first, to who has the least so far."""
    load, found = Counter[int](), [0] * len(held)
    for at in sorted(range(len(held)), key=lambda at: (-held[at][1], at)):
        where, weight = held[at]
        found[at] = min(where.flat, key=lambda rank: load[rank])
        load[found[at]] += weight
    return tuple(found)


def whole_on(rank: int, of: Layout, shape: Sequence[int] | None = None) -> Layout:
    """The layout of a tensor that is whole on one rank."""
    shape = of.shape if shape is None else tuple(shape)
    return Layout(Placement(of.placement.type, (rank,), (1,), None), State(((),) * len(shape)), shape, of.dtype)
