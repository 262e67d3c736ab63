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

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain, combinations, pairwise
from math import ceil, log2, prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .cluster import Cluster
from .device import family
from .grid import Placement, placement
from .network.hosts import Hosts

# Where every rank adds up everything: on two ranks 16 MiB take 1.4 times as long as in two halves, for the same bytes.
EVERYBODY_ADDS = 1.4

# From whom a rank receives in a collective that is no plain ring: one that adds up gets another share of links, others
# receive from all others, or from those beside them alone.
WAYS = dict.fromkeys(("all_to_all", "exchange", "all_reduce_once"), "pairs")
WAYS |= dict.fromkeys(("halo", "halo_sum"), "neighbours")
WAYS |= dict.fromkeys(("reduce_scatter", "all_reduce"), "sums")

__all__ = ["EVERYBODY_ADDS", "Links", "Price", "blocks", "common_grid", "wires"]

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
        links = cls(placement.shape, partial(cluster.link, placement))
        # NCCL's own all_reduce is already quick for what is small, and knows hosts; adding up by hand would be a kernel
        # a term.
        if family(placement.type).card:
            return links._replace(reductions=("all_reduce",))
        fine = cluster.by_levels(placement)
        if fine is placement:
            return links
        inner = cls(fine.shape, partial(cluster.link, fine))
        return links._replace(fine=inner, parts=tuple(blocks(placement.shape, fine.shape)))

    @property
    def without_latency(self) -> "Links":
        """The same where many moves go at once."""
        fine = self.fine and self.fine.without_latency
        return self._replace(link=lambda axes, ways: (0.0, self.link(axes, ways)[1]), fine=fine)

    @property
    def figures(self) -> tuple[Hashable, ...]:
        """Latency and bandwidth of all sets of axes, in each way: what moves cost goes by these alone."""
        axes = [axis for axis, size in enumerate(self.sizes) if size > 1]
        sets = chain.from_iterable(combinations(axes, many) for many in range(1, len(axes) + 1))
        links = [self.link(each, way) for each in sets for way in sorted({"ring", *WAYS.values()})]
        return self.sizes, self.reductions, self.parts, tuple(links), self.fine and self.fine.figures

    def ring(self, axes: tuple[int, ...]) -> tuple[float, float]:
        """Latency and bandwidth where each rank sends to the next one alone: of gathers or of sums, the quicker."""
        return max((self.link(axes, ways) for ways in ("ring", "sums")), key=lambda link: link[1])

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
        latency, bandwidth = self.link(axes, WAYS.get(kind, "ring"))
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


def common_grid(p: Placement, q: Placement) -> Placement | None:
    """The coarsest grid of the same ranks of which both are blocks of neighbouring axes, or None where there is none.

    >>> data = placement("cuda:[0-7] as (data=8)")
    >>> common_grid(data, data.folded("data", "expert", 4)).shape, common_grid(data, placement("cuda:[0-3]"))
    ((2, 4), None)
    """
    if p.type != q.type or p.flat != q.flat:
        return None
    ends = sorted({prod(r.shape[: a + 1]) for r in (p, q) for a in range(r.ndim)})
    if any(b % a for a, b in pairwise(ends)):
        return None
    shape = tuple(b // a for a, b in zip([1, *ends], ends, strict=False) if b > a)
    return placement(p.type, p.flat).reshape(shape or (1,))


def wires(cluster: Cluster, hosts: Hosts, type: str = "cpu") -> list[float]:
    """By rank, bytes a second that its host sends by the quickest of its links to others, all ranks at once.

    >>> from .cluster import cluster
    >>> {*wires(cluster("two_level"), Hosts((0,) * 8 + (1,) * 8))}  # 1/8 a rank, in the units of that preset
    {1.0}
    """
    found = [0.0] * hosts.count
    many = [len(group) for group in hosts.groups]
    own = {frozenset(link.ranks) for link in cluster.links}
    for one, other in combinations(range(hosts.count), 2):
        a, b = hosts.members(one)[0], hosts.members(other)[0]
        _, bandwidth = cluster.between(Placement(type, (a,), (1,), None), Placement(type, (b,), (1,), None))
        # As measured ones are written: links of their own for the ranks that both have, levels for the most.
        wire = bandwidth * (min(many[one], many[other]) if frozenset((a, b)) in own else max(many))
        found[one], found[other] = max(found[one], wire), max(found[other], wire)
    return [found[host] for host in hosts.numbers]
