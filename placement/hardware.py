"""The parts of a cluster: levels and what joins them, devices, and what is unlike the others of its kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .errors import PlacementError
from .ranks import check_type

__all__ = ["RESERVED", "Device", "Level", "RankDevice", "RankLink", "check_groups"]

RESERVED = 0.05  # share of a device's memory for its context, buffers of links, and gaps between tensors


@dataclass(frozen=True, slots=True)
class Level:
    """One ring of the hierarchy: `size` units of the level below, joined by links of one kind.

    Latency is seconds for a hop, bandwidth bytes per second that one device sends while all devices send. `groups` are
    the ranks of each unit where these do not follow each other in equal numbers; `size` is that of the largest.
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        fit = isinstance(self.size, int) and self.size >= 1 and self.latency >= 0 and self.bandwidth > 0
        if not fit:
            raise PlacementError(
                f"level {self.name!r} cannot be\n  found {self}\n"
                "  size is a whole number from 1, latency seconds from 0, bandwidth bytes/s above 0"
            )
        ranks = [rank for group in self.groups for rank in group]
        if len({*ranks}) < len(ranks) or not all(self.groups) or not all(type(r) is int and r >= 0 for r in ranks):
            raise PlacementError(
                f"groups of level {self.name!r} cannot be\n  found {self.groups}\n"
                "  each rank stands in one of them, as in [[0, 1, 2], [3, 4]]"
            )


@dataclass(frozen=True, slots=True)
class Device:
    """One device: FLOP/s by the dtype's name, bytes of memory, bytes per second to its own memory.

    Bytes per second to the host's memory are by default those that PCIe 4 x16 reaches of its 32 GB/s, which is also
    about a device's share of the memory of a host with eight; to the host's disk, a share of a few NVMe drives.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    memory_bandwidth: float
    host_bandwidth: float = 25e9
    disk_bandwidth: float = 1e9
    type: str = "cuda"  # of placements on such devices

    def __post_init__(self) -> None:
        check_type(self.type)

    @property
    def room(self) -> float:
        """Bytes that a plan may take; infinitely many where nobody says how much memory there is."""
        return self.memory * (1 - RESERVED)


@dataclass(frozen=True, slots=True)
class RankLink:
    """The link between two ranks, where it is unlike that of the level which joins them."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        two = len(self.ranks) == 2 and len({*self.ranks}) == 2 and all(type(r) is int and r >= 0 for r in self.ranks)
        if not (two and self.latency >= 0 and self.bandwidth > 0):
            raise PlacementError(
                f"a link cannot be\n  found {self}\n"
                "  ranks are two, as in [1, 2], latency seconds from 0, bandwidth bytes/s above 0"
            )


@dataclass(frozen=True, slots=True)
class RankDevice:
    """The device of some ranks, where it is unlike that of all others."""

    ranks: tuple[int, ...]
    device: Device

    def __post_init__(self) -> None:
        if not self.ranks or not all(type(rank) is int and rank >= 0 for rank in self.ranks):
            raise PlacementError(f"a device of no ranks\n  found {self.ranks}\n  list its ranks, as in [2, 3]")


def check_groups(name: str, levels: Sequence[Level]) -> None:
    """Refuse levels of a cluster of which one lists its units, and an outer one has units that do not hold them whole.
    The outermost is one unit, and need not list it."""
    for inner, outer in pairwise(levels):
        last = outer is levels[-1]
        homes = {rank: unit for unit, group in enumerate(outer.groups) for rank in group}
        whole = all(len({homes.get(rank) for rank in group}) == 1 for group in inner.groups)
        listed = {rank for group in inner.groups for rank in group}
        fit = whole and homes.keys() == listed if outer.groups else last or not inner.groups
        if not fit:
            raise PlacementError(
                f"cluster {name!r}: groups of level {outer.name!r} hold those of {inner.name!r} whole\n"
                f"  found {inner.groups}\n  in    {outer.groups}"
            )
