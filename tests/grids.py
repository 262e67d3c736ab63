"""Grids of cases that are too large to run whole."""

from collections.abc import Iterable
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[object, ...])


def with_all_pairs(rows: Iterable[Row]) -> list[Row]:
    """Some of the rows: any two values that are together in one of all are together in one of these.

    What a mistake needs is seldom more than two things that meet.

    >>> with_all_pairs([(a, b, c) for a in "xy" for b in "mn" for c in "rs"])
    [('x', 'm', 'r'), ('x', 'n', 's'), ('y', 'm', 's'), ('y', 'n', 'r')]
    """
    left = {row: {*combinations(enumerate(row), 2)} for row in rows}
    found: dict[Row, None] = {}
    while any(left.values()):
        best = max(left, key=lambda row: len(left[row]))
        found[best] = None
        met = left.pop(best)
        for pairs in left.values():
            pairs -= met
    return [*found]
