"""The price of a move: bytes received by the busiest rank, and seconds by latency and bandwidth of the links used.

n ranks, L the local buffer in bytes after the step (before it for all_reduce):

    slice, to_partial    0
    all_gather           L (n-1)/n      log2 n hops
    reduce_scatter       L (n-1)        log2 n hops
    all_reduce           2 L (n-1)/n    2 log2 n hops
    all_reduce_once      L (n-1)        as exchange: every rank sends all it has to every other, where latency rules
    all_to_all, exchange    what a rank needs and does not hold; log2 n hops, but an eighth of a hop a message
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from math import ceil, log2, prod
from typing import NamedTuple

from ...placement import Cluster, Placement
from ...sbp.state import Factors, overlap, pieces, spans

# Where every rank adds up everything: on two ranks 16 MiB take 1.4 times as long as in two halves, for the same bytes.
EVERYBODY_ADDS = 1.4

__all__ = ["AxisLinks", "Price", "extent", "missing", "truly_missing"]


class Price(NamedTuple):
    """Seconds, and bytes that the busiest rank receives."""

    time: float
    bytes: float


class AxisLinks(NamedTuple):
    """The axes of a placement as the search sees them: their sizes, and latency and bandwidth of any set of them."""

    sizes: tuple[int, ...]
    link: Callable[[tuple[int, ...]], tuple[float, float]]
    reductions: tuple[str, ...] = ("all_reduce", "all_reduce_once")

    @classmethod
    def of(cls, placement: Placement, cluster: Cluster) -> "AxisLinks":
        network = cls(placement.shape, lambda axes: cluster.link(placement, axes))
        # NCCL's own all_reduce is already quick for what is small; adding up by hand would be a kernel a term.
        return network if placement.type == "cpu" else network._replace(reductions=("all_reduce",))

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
        return self.moved(kind, axes, moved)

    def moved(self, kind: str, axes: tuple[int, ...], moved: float) -> Price:
        """The price of one collective over `axes` in which the busiest rank receives `moved` bytes."""
        latency, bandwidth = self.link(axes)
        n = self.ranks(axes)
        hops: float = ceil(log2(n))
        if kind == "all_reduce":
            hops *= 2
        elif kind in ("exchange", "all_to_all", "all_reduce_once"):
            hops = max(hops, (n - 1) / 8)
        work = moved * EVERYBODY_ADDS if kind == "all_reduce_once" else moved
        return Price(hops * latency + work / bandwidth, moved)

    def exchange(self, axes: tuple[int, ...], moved: float) -> Price:
        """The price of one slice exchange over `axes` in which the busiest rank receives `moved` bytes."""
        return self.moved("exchange", axes, moved)


@lru_cache(maxsize=1 << 14)
def extent(size: int, factors: Factors, sizes: tuple[int, ...]) -> int:
    """The longest local length of a dim among all ranks.

    >>> extent(5, (0,), (2, 2)), extent(8, (-2, 1), (2, 2)), extent(1, (0,), (4,))
    (3, 4, 1)
    """
    copies, longest = 1, size
    for f in factors:
        parts = sizes[f] if f >= 0 else -f
        longest = -(-longest // parts)
        copies *= 1 if f >= 0 else parts
    return min(size, longest * copies)


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
    cells = prod(sizes[f] if f >= 0 else -f for f in have) * prod(sizes[f] if f >= 0 else -f for f in need)
    worst = cells
    for at in product(*({0, 1, sizes[a] - 1} for a in axes)):  # the extremes are at the ends of an axis
        coords = [0] * len(sizes)
        for a, i in zip(axes, at, strict=True):
            coords[a] = i
        where = tuple(coords)
        shared = overlap(spans(cells, have, where, sizes), spans(cells, need, where, sizes))
        worst = min(worst, sum(n for _, _, n in shared))
    return worst / cells
