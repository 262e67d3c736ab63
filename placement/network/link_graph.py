"""Link graphs: direct links between ranks, in the place of switches; what no link joins goes on from rank to rank.

    0 --- 1 --- 2 --- 3         a ring over 0, 1, 2, 3 has links of its own, and so has its other direction
    |                 |         from 0 to 2 half of a link is left where every rank sends two ranks on
    +-----------------+

A collective over n ranks goes in rings, member after member by a stride that has no divisor in common with n; each
stride whose links are all there and free is one more ring, and bytes are shared among them.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ..errors import PlacementError

__all__ = ["LinkGraph", "strides"]

LOOKS = 8  # strides that are tried where no ring has links of its own


@dataclass(frozen=True)
class LinkGraph:
    """Links, each of so many bytes a second either way; a pair of ranks that is listed twice has two.

    >>> ring = LinkGraph(((0, 1), (1, 2), (2, 3), (3, 0)), latency=1.0, bandwidth=8.0)
    >>> ring.together([range(4)], "ring"), ring.together([(0, 2), (1, 3)], "ring"), ring.together([(0, 1)], "ring")
    ((1.0, 16.0), (2.0, 4.0), (1.0, 8.0))
    """

    links: tuple[tuple[int, int], ...]
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        two = all(len(link) == 2 and len({*link}) == 2 and min(link) >= 0 for link in self.links)
        if not (self.links and two and self.latency >= 0 and self.bandwidth > 0):
            raise PlacementError(
                f"a graph of links cannot be\n  found {self}\n"
                "  links are pairs of ranks, as in [[0, 1], [1, 2]], latency seconds from 0, bandwidth bytes/s above 0"
            )
        ranks = {rank for link in self.links for rank in link}
        apart = ranks - self._from(min(ranks)).keys()
        if apart:
            raise PlacementError(
                f"no way leads from rank {min(ranks)} to rank {min(apart)} in a graph of links\n"
                "  add links, so that each rank is reached by others"
            )

    @cached_property
    def ways(self) -> Counter[tuple[int, int]]:
        """Links from a rank to another."""
        return Counter(way for a, b in self.links for way in ((a, b), (b, a)))

    @cached_property
    def beside(self) -> dict[int, list[int]]:
        """The ranks beside each."""
        found: dict[int, list[int]] = {}
        for a, b in self.ways:
            found.setdefault(a, []).append(b)
        return found

    def together(self, groups: Sequence[Sequence[int]], ways: str) -> tuple[float, float]:
        """Latency of a step, and bytes a second that each rank receives, where all groups are at work at once: in a
        `ring`, which may add up (`sums`), from all others of its group (`pairs`), or from the one before it
        (`neighbours`)."""
        self._check(rank for group in groups for rank in group)
        size = max(map(len, groups))
        if size < 2:
            return self.latency, self.bandwidth
        if ways == "pairs":
            hops, load = self._load((a, b) for group in groups for a in group for b in group if a != b)
            return hops * self.latency, self.bandwidth * (size - 1) / load
        ring = ways != "neighbours"
        rings = self._rings(groups, size) if ring else 0
        if rings:
            return self.latency, rings * self.bandwidth
        tried = strides(size)[:LOOKS] if ring else [1]
        hops, load = min((self._load(_edges(groups, stride)) for stride in tried), key=lambda found: found[1])
        return hops * self.latency, self.bandwidth / load

    def between(self, here: Sequence[int], there: Sequence[int]) -> tuple[float, float]:
        """Latency and bytes a second of each rank that sends what it has to one on the other side."""
        self._check((*here, *there))
        many = max(len(here), len(there))
        pairs = [(here[k % len(here)], there[k % len(there)]) for k in range(many)]
        hops, load = self._load((a, b) for a, b in pairs if a != b)
        return max(1, hops) * self.latency, self.bandwidth / load if load else self.bandwidth

    def _rings(self, groups: Sequence[Sequence[int]], size: int) -> int:
        """How many rings over all groups at once have links of their own."""
        free, found = self.ways.copy(), 0
        for stride in strides(size):
            needed = Counter(_edges(groups, stride))
            while all(free[way] >= many for way, many in needed.items()):
                free.subtract(needed)
                found += 1
        return found

    def _load(self, pairs: Iterable[tuple[int, int]]) -> tuple[int, float]:
        """The steps of the longest of these ways, and how many of them share the busiest link."""
        load: Counter[tuple[int, int]] = Counter()
        longest = 0
        for a, b in pairs:
            before, steps = self._routes(a), 0
            while b != a:
                load[before[b], b] += 1
                b, steps = before[b], steps + 1
            longest = max(longest, steps)
        return longest, max((many / self.ways[way] for way, many in load.items()), default=0.0)

    def _routes(self, start: int) -> dict[int, int]:
        known = self._known.get(start)
        if known is None:
            known = self._known[start] = self._from(start)
        return known

    @cached_property
    def _known(self) -> dict[int, dict[int, int]]:
        return {}

    def _from(self, start: int) -> dict[int, int]:
        """For each rank the one before it on a shortest way from the start; ties go to others for another start."""
        before, front = {start: start}, deque([start])
        while front:
            rank = front.popleft()
            near = sorted(self.beside[rank], key=lambda other: (other - start) % len(self.beside))
            for other in near:
                if other not in before:
                    before[other] = rank
                    front.append(other)
        return before

    def _check(self, ranks: Iterable[int]) -> None:
        missing = sorted({*ranks} - self.beside.keys())
        if missing:
            raise PlacementError(
                f"rank {missing[0]} has no link in this cluster's graph\n  it joins ranks {min(self.beside)} to "
                f"{max(self.beside)}: add links, or use fewer ranks"
            )


def strides(size: int) -> list[int]:
    """The strides by which one gets round so many members: those without a common divisor.

    >>> strides(8), strides(2)
    ([1, 3, 5, 7], [1])
    """
    return [stride for stride in range(1, size) if gcd(stride, size) == 1]


def _edges(groups: Sequence[Sequence[int]], stride: int) -> Iterator[tuple[int, int]]:
    for group in groups:
        for k, rank in enumerate(group):
            if len(group) > 1:
                yield rank, group[(k + stride) % len(group)]
