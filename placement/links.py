"""The price of a collective: bytes that the busiest rank receives, and seconds by latency and bandwidth of its links.

n ranks, L the local buffer in bytes after the step (before it for all_reduce):

    slice, to_partial    0
    all_gather           L (n-1)/n      log2 n hops
    reduce_scatter       L (n-1)        log2 n hops
    all_reduce           2 L (n-1)/n    2 log2 n hops
    all_reduce_once      L (n-1)        as exchange: every rank sends all it has to every other, where latency rules
    all_to_all, exchange    what a rank needs and does not hold; log2 n hops, but an eighth of a hop a message
    halo, halo_sum       what a rank's windows see of others' pieces, and its gradient on the way back; one hop
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log2, prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .cluster import Cluster
from .device import family
from .grid import Placement

# Where every rank adds up everything: on two ranks 16 MiB take 1.4 times as long as in two halves, for the same bytes.
EVERYBODY_ADDS = 1.4

__all__ = ["EVERYBODY_ADDS", "Links", "Price", "blocks"]

Bytes = TypeVar("Bytes", float, npt.NDArray[np.float64])


class Price(NamedTuple):
    """Seconds, and bytes that the busiest rank receives."""

    time: float
    bytes: float


class Links(NamedTuple):
    """The axes of a placement as moves see them: their sizes, and latency and bandwidth of any set of them."""

    sizes: tuple[int, ...]
    link: Callable[[tuple[int, ...], str], tuple[float, float]]
    reductions: tuple[str, ...] = ("all_reduce", "all_reduce_once")
    fine: "Links | None" = None  # with axes that cross hosts cut in two, where moves go in steps
    parts: tuple[tuple[int, ...], ...] = ()  # the axes of those that each axis here is cut into, the outer one first

    @classmethod
    def of(cls, placement: Placement, cluster: Cluster) -> "Links":
        links = cls(placement.shape, lambda axes, kind: cluster.link(placement, axes, kind))
        # NCCL's own all_reduce is already quick for what is small, and knows hosts; adding up by hand would be a kernel
        # a term.
        if family(placement.type).card:
            return links._replace(reductions=("all_reduce",))
        fine = cluster.by_levels(placement)
        if fine is placement:
            return links
        inner = cls(fine.shape, lambda axes, kind: cluster.link(fine, axes, kind))
        return links._replace(fine=inner, parts=tuple(blocks(placement.shape, fine.shape)))

    @property
    def without_latency(self) -> "Links":
        """The same where many moves go at once."""
        fine = self.fine and self.fine.without_latency
        return self._replace(link=lambda axes, kind: (0.0, self.link(axes, kind)[1]), fine=fine)

    def ring(self, axes: tuple[int, ...]) -> tuple[float, float]:
        """Latency and bandwidth where each rank sends to the next one alone."""
        return self.link(axes, "all_gather")

    def ranks(self, axes: tuple[int, ...]) -> int:
        return prod(self.sizes[a] for a in axes)

    def price(self, kind: str, axes: tuple[int, ...], size: float) -> Price:
        """The price of one collective over `axes`, where `size` is L of the table in bytes."""
        n = self.ranks(axes)
        moved = {
            "all_reduce": 2 * size * (n - 1) / n,
            "all_reduce_once": size * (n - 1),
            "reduce_scatter": size * (n - 1),
        }.get(kind, size * (n - 1) / n)
        return Price(self.seconds(kind, axes, moved), moved)

    def stepwise(self, kind: str, axis: int, moved: Bytes) -> Bytes:
        """The seconds of an all_gather or a reduce_scatter over an axis, for one that crosses hosts in steps: few bytes
        between hosts, and the rest inside of them."""
        if self.fine is None or len(self.parts[axis]) < 2:
            return self.seconds(kind, (axis,), moved)
        pieces, total = 1, 0.0 * moved
        for part in self.parts[axis]:
            size = self.fine.sizes[part]
            share = (size - 1) * pieces / (self.sizes[axis] - 1)
            total = total + self.fine.seconds(kind, (part,), moved * share)
            pieces *= size
        return total

    def seconds(self, kind: str, axes: tuple[int, ...], moved: Bytes) -> Bytes:
        """The seconds of one collective over `axes` in which the busiest rank receives `moved` bytes."""
        latency, bandwidth = self.link(axes, kind)
        n = self.ranks(axes)
        hops: float = ceil(log2(n))
        if kind == "all_reduce":
            hops *= 2
        elif kind in ("exchange", "all_to_all", "all_reduce_once"):
            hops = max(hops, (n - 1) / 8)
        elif kind in ("halo", "halo_sum"):
            hops = 1
        work = moved * EVERYBODY_ADDS if kind == "all_reduce_once" else moved
        return hops * latency + work / bandwidth


def blocks(coarse: Sequence[int], fine: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """For each axis of a grid those that it is cut into in a finer one.

    >>> list(blocks((2, 16), (2, 2, 8)))
    [(0,), (1, 2)]
    """
    at = 0
    for size in coarse:
        start = at
        while prod(fine[start:at]) < size:
            at += 1
        yield tuple(range(start, at))
