"""Two levels for hosts whose links nobody has measured: inside a host as its preset has it, between hosts with care.

Too slow a guess keeps bytes off a link that would have carried them; too fast a one sends a step's gradients over a
link that takes seconds for them. So where an interface does not tell its rate, hosts have the slowest wire in use.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..hardware import Level
from .hosts import RunHosts

__all__ = ["host_levels", "two_levels"]

CAREFUL = 1e9 / 8  # bytes per second: an Ethernet of 1 Gbit/s, the slowest on which people train
WITH_CARDS = 1e10 / 8  # hosts that have cards have more
REACHED = 0.8  # of a wire's rate, by large messages over TCP
LATENCY = 200e-6  # seconds of a hop by Gloo through two hosts and a switch; over loopback it takes 60 us


def two_levels(preset: Sequence[Level], run: RunHosts) -> tuple[tuple[Level, ...], str]:
    """The levels of a run on several hosts, and what they rest on. All ranks of a host share its wire.

    Cards with adapters of InfiniBand beside them send by those, as their preset has it.
    """
    inside, beyond = preset[0], preset[1:]
    count, most = run.hosts.count, max(map(len, run.hosts.groups))
    levels = (host_levels(inside, run),)
    if beyond and all(each.adapters for each in run.interfaces):
        return (*levels, replace(beyond[0], size=count)), f"a guess of two levels: {count} hosts, joined by InfiniBand"
    careful = WITH_CARDS if beyond else CAREFUL
    slowest = min(run.interfaces, key=lambda each: each.rate or careful)
    rate = slowest.rate or careful
    between = Level("network", count, max(LATENCY, inside.latency), min(REACHED * rate / most, inside.bandwidth))
    name = slowest.name or "no interface"
    by = f"as {name} says" if slowest.rate else f"with care, as {name} tells no rate"
    return (*levels, between), f"a guess of two levels: {count} hosts, {rate * 8 / 1e9:g} Gbit/s between them, {by}"


def host_levels(inside: Level, run: RunHosts) -> Level:
    """The innermost level: the ranks of a host, listed where hosts have unequal numbers of them."""
    groups = run.hosts.groups
    return replace(inside, size=max(map(len, groups)), groups=() if run.hosts.alike else groups)
