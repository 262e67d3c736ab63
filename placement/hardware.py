"""The parts of a cluster: levels and what joins them, devices, and what is unlike the others of its kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import numpy as np

from .errors import PlacementError
from .ranks import check_type

__all__ = [
    "Calibration",
    "Device",
    "GAPS",
    "Jitter",
    "KEPT_FREE",
    "Level",
    "RankDevice",
    "RankLink",
    "MoveShares",
    "check_groups",
    "slowest_device",
    "unlike_groups",
]

KEPT_FREE = 0.04  # share of a device's memory for its context and buffers of links: 3 GiB of 80
# What tensors that come and go leave between them, as a share of their bytes: memory that torchtitan's notes tell as
# reserved is that of weights, gradients and states, and 1.15 to 1.37 times the rest, in the middle 1.27 times.
GAPS = 0.27


@dataclass(frozen=True, slots=True)
class MoveShares:
    """The parts of a level's bandwidth that moves of a kind get: a `hop` from stage to stage or to a neighbour, a
    `gather` of pieces, or an exchange of them, and a `sum` in pieces, or in pieces and gathered again."""

    hop: float = 1.0
    gather: float = 1.0
    sum: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hop", "gather", "sum"):
            if not 0 < getattr(self, name) <= 1:
                raise PlacementError(
                    f"shares of a level cannot be: {name} = {getattr(self, name)}\n"
                    f"  a share of its bandwidth is above 0 and at most 1, as in {name} = 0.85"
                )

    def of(self, ways: str) -> float:
        """The part of moves that go one of these ways: in rings, from all others, or from those beside a rank."""
        return {"sums": self.sum, "neighbours": self.hop, "hop": self.hop}.get(ways, self.gather)


@dataclass(frozen=True, slots=True)
class Level:
    """One ring of the hierarchy: `size` units of the level below, joined by links of one kind.

    Latency is seconds for a hop, bandwidth bytes per second that one device sends while all devices send. `groups` are
    the ranks of each unit where these do not follow each other in equal numbers; `size` is that of the largest.
    `shares` say which moves get less of the bandwidth than others.
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    shares: MoveShares = field(default=MoveShares(), repr=False)

    def rate(self, ways: str) -> float:
        """Bytes per second of moves that go this way."""
        return self.bandwidth * self.shares.of(ways)

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
class Calibration:
    """The part of a datasheet that a device reaches: shares of its peaks, and the seconds of a launch.

    A product takes `2mnk / (product x FLOP/s) + bytes / (memory x bytes/s) + launch`, which is also its curve by size.
    A launch is a kernel's part of a step's call that has nothing to compute: on a CPU all that Python and autograd do.
    A card computes while the `host` launches what comes next, so that small kernels wait for Python.
    `source` says where the constants were fitted and on what, `error` is the median relative error there.
    """

    product: float  # of FLOP/s, in a large product
    memory: float  # of bytes per second
    launch: float  # seconds of a kernel that has nothing to do
    source: str
    error: float
    attention: float | None = None  # of FLOP/s, in fused attention; None: as products
    functions: float = 1.0  # times as long as its bytes take: a GELU, which evaluates one function of each element
    update: float | None = None  # the same of a kernel that writes where it reads, as a fused AdamW; None: its bytes
    host: float = 0.0  # seconds in which the host launches a kernel while a card computes: the longer of both counts

    def __post_init__(self) -> None:
        for name in ("product", "memory", "attention"):
            share = getattr(self, name)
            if share is not None and not 0 < share <= 1:
                raise PlacementError(
                    f"fitted constants cannot be: {name} = {share}\n"
                    f"  a share of the datasheet's figure is above 0 and at most 1, as in {name} = 0.78"
                )
        if not 1 <= self.functions < inf:
            raise PlacementError(
                f"fitted constants cannot be: functions = {self.functions}\n"
                "  how many times as long as a sum of as many bytes exponentials take: 1 or more, as in functions = 2.5"
            )
        if self.update is not None and not 0 < self.update < inf:
            raise PlacementError(
                f"fitted constants cannot be: update = {self.update}\n"
                "  how many times as long as a sum of as many bytes a fused update takes: above 0, as in update = 0.7"
            )
        for name, usual in (
            ("launch", "3e-6 (seconds of a kernel)"),
            ("error", "0.05 (5 %, where it was fitted)"),
            ("host", "1e-5 (seconds of Python for a kernel)"),
        ):
            if not 0 <= getattr(self, name) < inf:
                raise PlacementError(
                    f"fitted constants cannot be: {name} = {getattr(self, name)}\n  0 or more, as in {name} = {usual}"
                )

    def __str__(self) -> str:
        return f"fitted, {self.source}, median error {self.error * 100:.2g} %"


@dataclass(frozen=True, slots=True)
class Jitter:
    """How unevenly devices of one kind compute: `scatter` is the standard deviation of a task's seconds, as a share of
    them, and one card in `one_in` is a straggler, which takes longer for all of its tasks by the share `slow`.

    Answers that it is drawn for are the same for the same `seed`.

    >>> print(Jitter(0.03, slow=0.2, one_in=1000))
    tasks scatter by 3 %, one card in 1,000 takes 20 % longer, seed 0
    """

    scatter: float = 0.0
    slow: float = 0.0
    one_in: float = inf
    seed: int = 0

    def __post_init__(self) -> None:
        for name, holds, fix in (
            ("scatter", 0 <= self.scatter <= 1, "a share from 0 to 1, as in scatter = 0.03 (3 % of a task)"),
            ("slow", 0 <= self.slow < inf, "0 or more, as in slow = 0.2 (20 % longer)"),
            ("one_in", self.one_in >= 1, "cards of which one is slow, 1 or more, as in one_in = 1000"),
            ("seed", type(self.seed) is int and self.seed >= 0, "a whole number from 0, as in seed = 0"),
        ):
            if not holds:
                raise PlacementError(f"jitter cannot be: {name} = {getattr(self, name)}\n  {fix}")
        if (self.slow > 0) != (self.one_in < inf):
            said, other = ("slow", "one_in = 1000") if self.slow else ("one_in", "slow = 0.2")
            raise PlacementError(
                f"jitter cannot be: {said} = {getattr(self, said):g} alone\n"
                f"  say both how many cards have one slow one and by what share, as in {other}"
            )

    def __bool__(self) -> bool:
        return self.scatter > 0 or self.slow > 0

    def __str__(self) -> str:
        slow = f", one card in {self.one_in:,g} takes {self.slow * 100:.3g} % longer" if self.slow else ""
        return f"tasks scatter by {self.scatter * 100:.3g} %{slow}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Device:
    """One device as its datasheet has it: FLOP/s by the dtype's name, bytes of memory, bytes per second to its own
    memory; and what it reaches of that, where somebody has `fitted` it.

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
    fitted: Calibration | None = None
    jitter: Jitter | None = None  # None: all alike

    def __post_init__(self) -> None:
        check_type(self.type)

    @property
    def room(self) -> float:
        """Bytes that a plan may take, gaps and all; infinitely many where nobody says how much memory there is."""
        return self.memory * (1 - KEPT_FREE)

    @property
    def said(self) -> str:
        """How its seconds are known."""
        return f"{self.name}: {self.fitted or 'datasheet, not calibrated'}"


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


def slowest_device(kinds: Sequence[Device]) -> Device:
    """The device that stands for several kinds of which all wait for each other: the least of each figure."""
    names = dict.fromkeys(name for kind in kinds for name in kind.flops)
    return Device(
        " and ".join(sorted(dict.fromkeys(kind.name for kind in kinds))),
        {name: min(_rate(kind, name) for kind in kinds) for name in names},
        min(kind.memory for kind in kinds),
        min(kind.memory_bandwidth for kind in kinds),
        min(kind.host_bandwidth for kind in kinds),
        min(kind.disk_bandwidth for kind in kinds),
        fitted=_least_fitted(kinds),
        jitter=_most_jitter(kinds),
    )


def _rate(device: Device, dtype: str) -> float:
    """FLOP/s; where nothing is said of a dtype, those of float32."""
    return device.flops.get(dtype) or device.flops.get("float32", inf)


def _least_fitted(kinds: Sequence[Device]) -> Calibration | None:
    """The constants of devices that wait for each other: of those that are fitted the least shares, the longest
    launch."""
    fitted = [kind.fitted for kind in kinds if kind.fitted]
    if not fitted:
        return None
    shares = [each.product if each.attention is None else each.attention for each in fitted]
    updates = [each.update for each in fitted if each.update is not None]
    return Calibration(
        min(each.product for each in fitted),
        min(each.memory for each in fitted),
        max(each.launch for each in fitted),
        "; ".join(dict.fromkeys(each.source for each in fitted)),
        max(each.error for each in fitted),
        min(shares),
        max(each.functions for each in fitted),
        max(updates) if updates else None,
        max(each.host for each in fitted),
    )


def _most_jitter(kinds: Sequence[Device]) -> Jitter | None:
    known = [kind.jitter for kind in kinds if kind.jitter]
    if not known:
        return None
    slow, one_in = max(each.slow for each in known), min(each.one_in for each in known)
    return Jitter(max(each.scatter for each in known), slow, one_in, known[0].seed)


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


def unlike_groups(groups: Sequence[tuple[int, ...]], units: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """One of all groups of ranks that lie alike in units of these sizes, and that with the highest rank: there may be
    thousands of groups, and few ways.

    >>> unlike_groups([(0, 1), (2, 3), (3, 4), (6, 7)], [4, 8])
    ((0, 1), (3, 4), (6, 7))
    """
    ranks = np.array(groups)
    where = np.concatenate([ranks // size - ranks[:, :1] // size for size in units], axis=1)
    found: dict[bytes, tuple[int, ...]] = {}
    for each, group in zip(where, groups, strict=True):
        found.setdefault(each.tobytes(), group)
    return tuple(dict.fromkeys([*found.values(), groups[int(ranks.max(axis=1).argmax())]]))
