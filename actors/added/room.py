"""Room and idle time of a network's queues: how much of it there is, and how much of that more work took."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from ..protocol.network import Network
from ..protocol.simulate import Simulation, simulate

__all__ = ["held_at_once", "hidden", "lying"]


def hidden(before: Network, run: Simulation) -> dict[str, float]:
    """By queue the time of added actors that lies within the span of the step as it was, and so costs none."""
    alone = simulate(before)
    known = {actor.name for actor in before.actors}
    found = dict.fromkeys(before.queues, 0.0)
    for ran in run.firings:
        if ran.actor not in known and ran.queue in found:
            found[ran.queue] += max(0.0, min(ran.end, alone.end) - ran.start)
    return found


def held_at_once(
    run: Simulation, registers: Collection[str], ranks: Mapping[str, int | Sequence[int] | str] = MappingProxyType({})
) -> dict[str, int]:
    """The most slots in use at once, by queue, of these registers. A register lies with the queue that reads it, or
    with the one that `ranks` names for that queue, such as one of an addition.

    A slot is in use from the start of the firing that fills it to the end of the one that frees it.
    """
    events: list[tuple[float, int, str]] = []
    for name, place in lying(run.network, registers, ranks).items():
        frees: list[list[float]] = []  # of each reader
        for actor in run.network.actors:
            fired = [ran for ran in run.firings if ran.actor == actor.name]
            for give in (give for give in actor.gives if give.register == name):
                mine = [ran for ran in fired if actor.active(give, ran.case)]
                events += [(ran.start, give.slots, place) for ran in mine[:: give.every]]
            for take in (take for take in actor.takes if take.register == name):
                mine = [ran for ran in fired if actor.active(take, ran.case)]
                frees.append([ran.end for ran in mine[take.every - 1 :: take.every] for _ in range(take.slots)])
        events += [(max(ends), -1, place) for ends in zip(*frees, strict=True)]
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for _, change, place in sorted(events, key=lambda event: (event[0], event[1])):
        now[place] = now.get(place, 0) + change
        most[place] = max(most.get(place, 0), now[place])
    return most


def lying(
    network: Network, registers: Collection[str], ranks: Mapping[str, int | Sequence[int] | str]
) -> dict[str, str]:
    """By register the queue that it lies with: who reads it first, or whom that one lies with."""
    found: dict[str, str] = {}
    for actor in network.actors:
        for take in actor.takes:
            if take.register in registers:
                with_ = ranks.get(actor.queue, actor.queue)
                found.setdefault(take.register, with_ if isinstance(with_, str) else actor.queue)
    return found
