"""Pieces: which parts of a tensor a process writes, so that all together write each element once.

    S(0) on ranks 0 1, B on the other axis          ranks 0 and 2 hold the upper half, 1 and 3 the lower one
      +-------+  process 0                          each half is cut in two, and each process writes a quarter
      |-------|  process 2
      +-------+  process 1
      |-------|  process 3

Processes that hold the same share it alike; what is small goes to the one of them that has had least. All of them work
this out by themselves, from layouts alone, so nothing is sent for it.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod

from ...sbp import Layout
from ...sbp.state import Spans, nth_part
from .values import Region

__all__ = ["SMALL", "Shares", "boxes", "cut", "intersection", "sizes_of"]

SMALL = 64 << 10  # bytes that are not cut: an entry of a header costs a hundred


def sizes_of(region: Region) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in region)


def intersection(one: Region, other: Region) -> Region | None:
    """The indices that are in both; None where that is nothing.

    >>> intersection(((0, 4),), ((2, 6),)), intersection(((0, 2),), ((2, 6),)), intersection((), ())
    (((2, 4),), None, ())
    """
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        lo, hi = max(a, c), min(b, d)
        if lo >= hi:
            return None
        found.append((lo, hi))
    return tuple(found)


def boxes(spans: Sequence[Spans]) -> list[Region]:
    """The boxes that index ranges of each dim make; none where a dim has none.

    >>> boxes((((0, 2), (4, 6)), ((0, 3),)))
    [((0, 2), (0, 3)), ((4, 6), (0, 3))]
    """
    return [tuple(region) for region in product(*spans)]


def cut(region: Region, parts: int) -> list[Region]:
    """At most so many nearly equal boxes that make up a box. It is cut along its first dim, or the longest if that one
    is not long enough to be cut alike.

    >>> cut(((0, 6), (0, 8)), 2), cut(((0, 1), (3, 6)), 2)
    ([((0, 3), (0, 8)), ((3, 6), (0, 8))], [((0, 1), (3, 5)), ((0, 1), (5, 6))])
    """
    sizes = sizes_of(region)
    if not sizes or parts < 2:
        return [region]
    even = sizes[0] % parts == 0 or sizes[0] >= 16 * parts
    d = 0 if even and sizes[0] else max(range(len(sizes)), key=lambda d: sizes[d])
    (lo, hi), parts = region[d], min(parts, max(sizes[d], 1))
    return [(*region[:d], nth_part(lo, hi, i, parts), *region[d + 1 :]) for i in range(parts)]


class Shares:
    """The shares of processes in tensors, one after the other; `process` tells of a rank whose it is.

    Those that hold the same must ask for the same tensors in the same order.
    """

    def __init__(self, process: Callable[[int], int]) -> None:
        self.process = process
        self.had: dict[tuple[int, ...], list[int]] = {}  # bytes, by who shares

    def of(self, layout: Layout) -> dict[int, list[Region]]:
        """The boxes that each process writes of a tensor; of a partial one, of what it is when it is added up."""
        holders: dict[tuple[Spans, ...], set[int]] = {}
        for rank in layout.placement.flat:
            holders.setdefault(layout.spans(rank), set()).add(self.process(rank))
        found: dict[int, list[Region]] = {}
        if not layout.numel:
            one = min(min(members) for members in holders.values())
            return {one: [tuple((0, size) for size in layout.shape)]}
        for spans, members in holders.items():
            for region in boxes(spans):
                for member, part in self.shared(region, tuple(sorted(members)), layout.dtype.itemsize).items():
                    found.setdefault(member, []).append(part)
        return found

    def shared(self, region: Region, members: tuple[int, ...], width: int) -> Mapping[int, Region]:
        """One box, shared by processes that all have it."""
        had = self.had.setdefault(members, [0] * len(members))
        small = prod(sizes_of(region)) * width < SMALL
        parts = sorted(cut(region, 1 if small else len(members)), key=lambda part: -prod(sizes_of(part)))
        least = sorted(range(len(members)), key=lambda at: (had[at], at))
        for at, part in zip(least, parts, strict=False):
            had[at] += prod(sizes_of(part)) * width
        return {members[at]: part for at, part in zip(least, parts, strict=False)}
