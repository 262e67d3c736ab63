"""From the times of pairs to the levels of a cluster: hosts that reach each other by wires of one kind are a group.

    200 Mbit/s   a-b  c-d           level `group`:    {a b} {c d}
     50 Mbit/s   a-c  a-d  b-c ...  level `network`:  all

A level has the rate of its wires over the number of ranks that send by one at once. A pair of hosts that is slower than
the level which joins them by others is written as links of its ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..hardware import Level, RankLink
from .hosts import Hosts

__all__ = ["PairLink", "measured_levels"]

ALIKE = 1.4  # wires of which none is faster than another by more are of one kind
MANY = 4096  # hosts alike that a network may have, as in the presets


@dataclass(frozen=True, slots=True)
class PairLink:
    """Two hosts while all their ranks send, or the ranks of one host: seconds of a hop, bytes per second of a rank, and
    how many ranks a side sent."""

    hosts: tuple[int, ...]
    latency: float
    bandwidth: float
    ranks: int

    @property
    def wire(self) -> float:
        return self.bandwidth * self.ranks


def measured_levels(
    hosts: Hosts, links: Sequence[PairLink], inside: Level
) -> tuple[tuple[Level, ...], tuple[RankLink, ...]]:
    """The levels of a run, innermost first, and the links unlike theirs; `inside` is that of a host where no host has
    two ranks."""
    own = [link for link in links if len(link.hosts) == 1]
    between = sorted((link for link in links if len(link.hosts) == 2), key=lambda link: -link.wire)
    if own:
        latency, bandwidth = median(link.latency for link in own), median(link.bandwidth for link in own)
        inside = replace(inside, latency=latency, bandwidth=bandwidth)
    if hosts.count == 1:
        return (inside,), ()
    found = [replace(inside, size=max(map(len, hosts.groups)))]
    parts, units, odd = [*range(hosts.count)], [[*range(hosts.count)]], list[PairLink]()
    for kind in _kinds(between):
        new = [link for link in kind if parts[link.hosts[0]] != parts[link.hosts[1]]]
        odd += [link for link in kind if link not in new]
        if new:
            parts = _joined(parts, new)
            units.append(parts)
            found.append(_level(new, len(units) - 1, _largest(units[-2], parts)))
    found[-1] = replace(found[-1], name="network")
    levels = _listed(found, [_ranks_of(hosts, unit) for unit in units])
    return levels, tuple(link for pair in odd for link in _rank_links(hosts, pair))


def _level(links: Sequence[PairLink], number: int, size: int) -> Level:
    """The ranks of the most that send by one wire are careful for those that are fewer."""
    wire, most = median(link.wire for link in links), max(link.ranks for link in links)
    return Level(f"group {number}", size, median(link.latency for link in links), wire / most)


def _kinds(links: Sequence[PairLink]) -> list[list[PairLink]]:
    """Links of the fastest wires first, cut where they are slower than the first of a kind by more than they may be."""
    kinds: list[list[PairLink]] = []
    for link in links:
        if kinds and kinds[-1][0].wire <= link.wire * ALIKE:
            kinds[-1].append(link)
        else:
            kinds.append([link])
    return kinds


def _joined(parts: Sequence[int], links: Iterable[PairLink]) -> list[int]:
    """The parts of hosts once these links join some, each by the number of its first host."""
    found = [*parts]
    for link in links:
        low, high = sorted(found[host] for host in link.hosts)
        found = [low if part == high else part for part in found]
    return found


def _largest(below: Sequence[int], parts: Sequence[int]) -> int:
    """How many parts of the level below the largest has."""
    return max(len({b for b, p in zip(below, parts, strict=True) if p == part}) for part in parts)


def _ranks_of(hosts: Hosts, parts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    units: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts.numbers):
        units.setdefault(parts[host], []).append(rank)
    return tuple(map(tuple, units.values()))


def _listed(levels: Sequence[Level], units: Sequence[tuple[tuple[int, ...], ...]]) -> tuple[Level, ...]:
    """Units are listed where they are not blocks of equal size, each of the size that capacity has for its level."""
    size, alike = 1, True
    for level, groups in zip(levels[:-1], units[:-1], strict=True):
        size *= level.size
        ranks = [rank for group in groups for rank in group]
        alike &= ranks == sorted(ranks) and {len(group) for group in groups} == {size}
    if alike:
        return (*levels[:-1], replace(levels[-1], size=MANY))
    return (*(replace(x, groups=g) for x, g in zip(levels[:-1], units[:-1], strict=True)), levels[-1])


def _rank_links(hosts: Hosts, pair: PairLink) -> Iterable[RankLink]:
    here, there = (hosts.members(host) for host in pair.hosts)
    return (RankLink((a, b), pair.latency, pair.bandwidth) for a in here for b in there)
