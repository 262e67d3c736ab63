"""Groups of devices for stages: how many devices of each host, because which of those alike does not matter.

With few devices every group is tried. With more, only some sizes are, and a stage of so many devices takes them in one
of three ways: from hosts that nobody uses yet, from hosts that are used already, or some from each host.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from ....placement import Cluster, Placement, placement

__all__ = ["DeviceGroups", "Used"]

ALL = 8  # devices of which every group is tried
SIZES = (1, 2, 3, 4, 6, *(k << n for n in range(2, 13) for k in (2, 3)))  # of groups of more, or of the devices left
Used = tuple[int, ...]  # devices of each kind


class DeviceGroups:
    """The devices of a placement by kind: those of one host that are alike, with links as their level has them."""

    def __init__(self, whole: Placement, cluster: Cluster) -> None:
        self.type = whole.type
        unlike = {rank for link in cluster.links for rank in link.ranks}
        unlike |= {rank for each in cluster.devices for rank in each.ranks}
        kinds: dict[tuple[str, int], list[int]] = {}
        for rank in whole.flat:
            kinds.setdefault(("rank", rank) if rank in unlike else ("host", cluster.unit(rank)), []).append(rank)
        self.kinds = list(kinds.values())
        self.many = len(whole.flat)
        self.none: Used = (0,) * len(self.kinds)
        self.full: Used = tuple(map(len, self.kinds))
        self.all_tried = self.many <= ALL
        self.known: dict[tuple[Used, Used], Placement] = {}

    def groups(self, used: Used, least: int, most: int) -> Iterator[Used]:
        """The groups that a stage may take where so many are used, of so many devices at least and at most."""
        free = [all_of - some for all_of, some in zip(self.full, used, strict=True)]
        if self.all_tried:
            for group in product(*(range(n + 1) for n in free)):
                if least <= sum(group) <= most:
                    yield group
            return
        order = range(len(free))
        fresh = sorted(order, key=lambda k: (used[k] > 0, k))
        again = sorted(order, key=lambda k: (used[k] == 0, k))
        left = sum(free)
        sizes = {n for size in SIZES for n in (size, left - size, left) if least <= n <= min(most, left)}
        for many in sorted(sizes):
            made = {_filled(free, many, fresh), _filled(free, many, again), _scattered(free, many)}
            yield from sorted(made)

    def next_of(self, used: Used, many: int) -> Used:
        """So many devices, from one host after the other."""
        free = [all_of - some for all_of, some in zip(self.full, used, strict=True)]
        return _filled(free, many, list(range(len(free))))

    def ranks(self, used: Used, group: Used) -> list[int]:
        """The devices themselves: the first ones of each kind that nobody has."""
        taken = zip(self.kinds, used, group, strict=True)
        return [rank for ranks, before, many in taken for rank in ranks[before : before + many]]

    def placed(self, used: Used, group: Used) -> Placement:
        if (used, group) not in self.known:
            self.known[used, group] = placement(self.type, self.ranks(used, group))
        return self.known[used, group]


def _filled(free: list[int], many: int, order: list[int]) -> Used:
    """Devices of one kind after the other."""
    taken: Counter[int] = Counter()
    for k in order:
        taken[k] = min(free[k], many - taken.total())
    return tuple(taken[k] for k in range(len(free)))


def _scattered(free: list[int], many: int) -> Used:
    """As many of each kind, as far as they go."""
    taken = [0] * len(free)
    while sum(taken) < many:
        for k, n in enumerate(free):
            if taken[k] < n and sum(taken) < many:
                taken[k] += 1
    return tuple(taken)
