"""Clusters: what a byte and a FLOP cost where tensors live; clusters.toml describes those known by name.

Where nobody says which, a run takes the file that SBPFLOW_CLUSTER names, as rank 0 reads it. Without one, several hosts
get two levels by a careful guess, and one host the preset of its devices.

network   2 nodes          20 GB/s a device
          |
node      8 devices       240 GB/s a device
          |
device    312 TFLOP/s      80 GB
"""

import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby
from operator import mul
from pathlib import Path

from .cluster_file import parts_of, written
from .device import family
from .errors import PlacementError, did_you_mean
from .grid import Placement
from .hardware import Device, Jitter, Level, RankDevice, RankLink, check_groups, slowest_device, unlike_groups
from .network.guess import two_levels
from .network.hosts import FILE, RunHosts, file_said
from .network.link_graph import LinkGraph
from .world import joined, world_so_far

__all__ = ["Cluster", "cluster", "default_cluster", "preset_here", "presets", "use_cluster"]

IN_FILE = ", file "  # in what is said of a cluster's links, before the path


# Compared and hashed by identity: plans are remembered per cluster, and a dict key must cost nothing.
@dataclass(frozen=True, eq=False)
class Cluster:
    """Levels from the innermost outward, and the device they join; ranks fill a node, then the next node.

    `links` are those of pairs of ranks that are unlike their level's, `devices` those of ranks that have others. A
    `graph` has all links there are, where ranks are joined without switches.

    >>> dgx = cluster("a100x8")
    >>> [level.name for level in dgx.levels], dgx.level_of([0, 7]), dgx.level_of([7, 8])
    (['node', 'network'], 0, 1)
    """

    name: str
    levels: tuple[Level, ...]
    device: Device
    links: tuple[RankLink, ...] = ()
    devices: tuple[RankDevice, ...] = ()
    origin: str = ""  # how its links are known: measured and when, or guessed and why
    graph: LinkGraph | None = None  # links without switches; what levels say of links does not count then

    def __post_init__(self) -> None:
        if not self.levels:
            raise PlacementError(f"cluster {self.name!r} has no levels\n  give at least one: Level(name, size, ...)")
        check_groups(self.name, self.levels)

    @cached_property
    def capacity(self) -> tuple[int, ...]:
        """The number of devices in one unit of each level, the largest one where they are unlike."""
        return tuple(accumulate((level.size for level in self.levels), mul))

    @cached_property
    def _homes(self) -> tuple[Mapping[int, int], ...]:
        """For each level that lists its units, the unit of each rank."""
        return tuple({r: unit for unit, group in enumerate(level.groups) for r in group} for level in self.levels)

    def unit(self, rank: int, level: int = 0) -> int:
        """The number of the unit of a level, by itself that of the innermost, in which a rank is.

        >>> cluster("a100x8").unit(9)
        1
        """
        homes = self._homes[level]
        return homes[rank] if homes else rank // self.capacity[level]

    def level_of(self, ranks: Iterable[int]) -> int:
        """The smallest level one unit of which holds all these ranks."""
        members = tuple(ranks)
        first, beyond = min(members, default=0), max(members, default=0)
        listed = self._homes[0]
        if beyond >= self.capacity[-1] or (listed and not listed.keys() >= {*members}):
            most = len(listed) if listed else self.capacity[-1]
            raise PlacementError(
                f"rank {beyond} is beyond cluster {self.name!r}\n"
                f"  {' x '.join(f'{level.size} ({level.name})' for level in self.levels)}"
                f" hold ranks 0 to {most - 1}\n"
                "  use a cluster with a larger top level, use_cluster(...)"
            )
        each = zip(self._homes, self.capacity, strict=True)
        one = (len({*map(homes.get, members)}) <= 1 if homes else first // n == beyond // n for homes, n in each)
        return next(k for k, holds in enumerate(one) if holds)

    def beside(self, types: Iterable[str], ranks: Iterable[int]) -> bool:
        """Whether moves among these ranks leave computing alone, because a card's copy engines or the network between
        hosts carry them. Ranks of one host on its CPU carry it themselves."""
        return any(family(type).card for type in types) or self.level_of(ranks) > 0

    def link(self, placement: Placement, axes: tuple[int, ...], ways: str = "ring") -> tuple[float, float]:
        """Latency of the outermost level that any group along these axes spans, and bytes a second that a rank gets: in
        a ring, in one that adds up (`sums`), from all others of its group (`pairs`), or from those beside it
        (`neighbours`).

        Several cards of a group in one node share what leaves it, each over its own adapter.

        >>> from .grid import placement
        >>> p = placement("cuda:[0-15] as (node=2, device=8)")
        >>> [cluster("h200x8").link(p, axes)[1] / 1e9 for axes in ((0,), (1,), (0, 1))]
        [40.0, 360.0, 320.0]
        """
        # The key holds the cluster itself: once this one is gone, its id could be that of another cluster.
        key = ("cluster.link", self, axes, ways)
        known = placement.memo.get(key)
        if isinstance(known, tuple):
            return known
        groups = placement.groups(axes)
        if self.graph is None and not self.links and not any(self._homes):
            few = placement.memo.get(("cluster.unlike", self, axes))
            groups = few if isinstance(few, tuple) else unlike_groups(groups, self.capacity)
            placement.memo["cluster.unlike", self, axes] = groups  # of all ways to use these links
        top = max(map(self.level_of, groups))
        if self.graph is not None:
            found = self.graph.together(groups, ways)
        elif self.links:
            found = min((self._slowest(group, group, ways) for group in groups), key=lambda link: link[1])
        elif family(placement.type).card and ways != "neighbours":
            found = self.levels[top].latency, min(self._shared(group, ways) for group in groups)
        else:
            found = self.levels[top].latency, self.levels[top].rate(ways)
        placement.memo[key] = found
        return found

    def _shared(self, group: Sequence[int], ways: str) -> float:
        """Bytes a second that each of a group receives where all of its cards send: in rings, or every one to all."""
        rates, inside = [self.levels[0].rate(ways)], 1
        for k, level in enumerate(self.levels[1 : self.level_of(group) + 1]):
            inside = min(Counter(self.unit(rank, k) for rank in group).values())
            outside = (len(group) - inside) / (len(group) - 1)
            rates.append(level.rate(ways) * (1 / outside if ways == "pairs" else inside))
        return min(rates)

    def by_levels(self, placement: Placement) -> Placement:
        """The placement with each axis that crosses units of a level cut in two, across and inside, where its blocks
        allow it.

        >>> from .grid import placement
        >>> cluster("two_level").by_levels(placement("cpu:[0-31] as (2, 16)")).shape
        (2, 2, 8)
        """
        known = placement.memo.get(("cluster.by_levels", self))
        if not isinstance(known, Placement):
            known = placement
            for level in reversed(range(len(self.levels) - 1)):
                known = _cut(known, partial(self.unit, level=level))
            placement.memo["cluster.by_levels", self] = known
        return known

    def between(self, here: Placement, there: Placement) -> tuple[float, float]:
        """Latency and bandwidth of the smallest level that holds both placements.

        >>> from .grid import placement
        >>> cluster("h200x8").between(placement("cuda:[0-3]"), placement("cuda:[8-11]"))
        (4e-06, 40000000000.0)
        """
        if self.graph is not None:
            return self.graph.between(here.flat, there.flat)
        return self._slowest(here.flat, there.flat)

    def _slowest(self, here: Sequence[int], there: Sequence[int], ways: str = "hop") -> tuple[float, float]:
        """The slowest link between two groups of ranks. That of the level which holds all counts, unless every pair has
        its own."""
        if not self.links:
            level = self.levels[self.level_of((*here, *there))]
            return level.latency, level.rate(ways)
        first, second = {*here}, {*there}
        both = len(first & second)
        pairs = len(first) * len(second) - both - both * (both - 1) // 2
        own = {
            frozenset(link.ranks): (link.latency, link.bandwidth)
            for link in self.links
            if any(a in first and b in second for a, b in (link.ranks, link.ranks[::-1]))
        }
        level = self.levels[self.level_of(first | second)]
        rest = [(level.latency, level.rate(ways))] if len(own) < pairs or not own else []
        return min((*own.values(), *rest), key=lambda link: (link[1], -link[0]))

    def device_of(self, placement: Placement) -> Device:
        """The device that others wait for on a placement: of several kinds the least of each figure.

        >>> from .grid import placement
        >>> mixed = replace(cluster("h100x8"), devices=(RankDevice((4, 5), cluster("a100x8").device),))
        >>> [mixed.device_of(placement("cuda", ranks)).name for ranks in ([3], [4], [3, 4])]
        ['H100', 'A100', 'A100 and H100']
        """
        if not self.devices:
            return self.device
        known = placement.memo.get(("cluster.device", self))
        if not isinstance(known, Device):
            known = placement.memo["cluster.device", self] = self._least(placement.flat)
        return known

    def _least(self, ranks: Iterable[int]) -> Device:
        of = {rank: each.device for each in self.devices for rank in each.ranks}
        found = {id(device): device for device in (of.get(rank, self.device) for rank in ranks)}
        return next(iter(found.values())) if len(found) == 1 else slowest_device([*found.values()])

    def with_node(self, size: int) -> "Cluster":
        """The same cluster with another number of devices in the innermost level.

        >>> cluster("two_level").with_node(2).level_of([0, 2])
        1
        """
        alike = (replace(level, groups=()) for level in self.levels[1:])
        return replace(self, levels=(replace(self.levels[0], size=size, groups=()), *alike))

    def with_jitter(self, jitter: Jitter | None) -> "Cluster":
        """The same cluster, whose devices compute as unevenly as this says."""
        others = (RankDevice(each.ranks, replace(each.device, jitter=jitter)) for each in self.devices)
        return replace(self, device=replace(self.device, jitter=jitter), devices=(*others,))

    def save(self, path: str | Path) -> None:
        """Write the cluster as TOML; `cluster(path)` and `Cluster.load(path)` read it back."""
        lines = written(self.name, self.origin, self.levels, self.device, self.links, self.devices, self.graph)
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Read a cluster from a TOML file as `save` writes it."""
        try:
            return _read_text(Path(path).read_bytes(), str(path))
        except OSError as error:
            raise PlacementError(f"cannot read cluster file {str(path)!r}\n  found {error.strerror}") from error

    @property
    def said(self) -> str:
        """How its links are known."""
        return self.origin or (f"preset {self.name}" if presets().get(self.name) is self else f"cluster {self.name}")


def cluster(name_or_path: str | Path) -> Cluster:
    """The cluster of this name in clusters.toml, or that of a file (a path, or a text that ends in .toml).

    A name with a star is so many nodes of it.

    >>> cluster("h100x8").device.memory_bandwidth
    3350000000000.0
    >>> cluster("h100x8*16").capacity
    (8, 128)
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        return Cluster.load(name_or_path)
    name_or_path, star, nodes = name_or_path.partition("*")
    if star:
        return _of_nodes(cluster(name_or_path), nodes)
    known = presets()
    if name_or_path not in known:
        raise PlacementError(
            f"no cluster is called {name_or_path!r}\n  known are {', '.join(known)}\n"
            "  a description of your own is a file, cluster('mine.toml')\n"
            f"  {did_you_mean(name_or_path, known, 'write one of them')}"
        )
    return known[name_or_path]


def _of_nodes(one: Cluster, nodes: str) -> Cluster:
    if not (nodes.isdigit() and int(nodes) and len(one.levels) > 1):
        raise PlacementError(
            f"cluster {one.name}*{nodes} cannot be\n  write how many nodes, as in h100x8*16, of one that has some"
        )
    levels = (*one.levels[:-1], replace(one.levels[-1], size=int(nodes)))
    return replace(one, name=f"{one.name}*{nodes}", levels=levels)


_override: Cluster | None = None


def use_cluster(which: Cluster | str | Path | None) -> AbstractContextManager[object]:
    """Price every placement of this process by this cluster, from now on or inside a `with`; None ends it.

    >>> with use_cluster("flat"):
    ...     default_cluster("cuda").name
    'flat'
    >>> default_cluster("cpu").name
    'cpu'
    """
    before = _override
    _set_override(which if which is None or isinstance(which, Cluster) else cluster(which))
    restore = ExitStack()
    restore.callback(_set_override, before)
    return restore


def default_cluster(placement: Placement | str) -> Cluster:
    """The cluster that prices a placement (or a device type): the one in use, the run's file, a guess for its hosts, or
    this machine's preset."""
    if _override is not None:
        return _override
    type = placement if isinstance(placement, str) else placement.type
    here = world_so_far() or joined()
    if here is None:
        return _of_run(type, None)
    known = here.clusters.get(type)
    if known is None:
        known = here.clusters[type] = _of_run(type, here.run)
    return known


def _of_run(type: str, run: RunHosts | None) -> Cluster:
    """The cluster of a run, which may be this process alone."""
    said = run.said if run else os.environ.get(FILE, "")
    if said:
        return _told(run, said)
    return preset_here(type) if run is None or run.hosts.count == 1 else _guessed(preset_here(type), run)


def _guessed(preset: Cluster, run: RunHosts) -> Cluster:
    levels, origin = two_levels(preset.levels, run)
    return replace(preset, name=f"{preset.name} on {run.hosts.count} hosts", levels=levels, origin=origin)


def _told(run: RunHosts | None, said: str) -> Cluster:
    """The preset of this name, or what the file says, as rank 0 of a run has read it."""
    if not said.endswith(".toml"):
        return cluster(said)
    text = run.text if run else file_said()[1]
    return _checked(_read_text(text.encode(), said), run)


def _checked(found: Cluster, run: RunHosts | None) -> Cluster:
    """The cluster of a file, which says so where the run has other hosts than were measured."""
    if run is None or "measured" not in found.origin:
        return found
    ranks = range(len(run.hosts.numbers))
    listed = found.levels[0].groups
    groups = listed or tuple(tuple(of) for _, of in groupby(ranks, found.unit))
    if groups == run.hosts.groups:
        return found
    many = " + ".join(str(len(group)) for group in run.hosts.groups)
    return replace(found, origin=f"{found.origin}, but hosts of this run have {many} ranks: measure again")


def _set_override(which: Cluster | None) -> None:
    global _override
    _override = which


@cache
def preset_here(type: str) -> Cluster:
    """The preset for devices of this type on this machine; that of the type where the cards here are not known."""
    kind = family(type)
    model = kind.module.get_device_name() if kind.card and kind.here else ""
    known = (c for c in presets().values() if c.device.type == type and c.device.name in model)
    return next(known, cluster(kind.preset))


@cache
def presets() -> Mapping[str, Cluster]:
    text = Path(__file__).with_name("clusters.toml").read_text(encoding="utf-8")
    return {name: _read({"name": name, **table}, f"cluster {name!r}") for name, table in tomllib.loads(text).items()}


def _read_text(text: bytes, path: str) -> Cluster:
    try:
        table = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlacementError(f"cluster file {path!r} is not TOML\n  found {error}") from None
    found = _read(table, f"cluster file {path!r}")
    origin = found.origin.partition(IN_FILE)[0]
    return replace(found, origin=f"{origin}{IN_FILE}{path}" if origin else f"as {path} has it")


def _read(table: Mapping[str, object], where: str) -> Cluster:
    return Cluster(**parts_of(table, where, Cluster))


def _cut(p: Placement, unit: Callable[[int], int]) -> Placement:
    """The placement with each axis cut in two that crosses units, which are told of each rank."""
    shape: list[int] = []
    for axis, n in enumerate(p.shape):
        groups = [[unit(rank) for rank in group] for group in p.groups((axis,))]
        inside = next(
            b
            for b in range(n, 0, -1)
            if n % b == 0 and all(len({*g[i : i + b]}) == 1 for g in groups for i in range(0, n, b))
        )
        shape += [n // inside, inside] if 1 < inside < n else [n]
    return p if len(shape) == p.ndim else Placement(p.type, p.flat, tuple(shape), None)
