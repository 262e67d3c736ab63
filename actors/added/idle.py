"""Idle time: how much of it the queues of a network have, and how much of that more work took."""

from collections.abc import Collection, Mapping

from ..protocol.network import Network
from ..protocol.simulate import Simulation, simulate

__all__ = ["end_of", "hidden", "held_at_once"]


def end_of(run: Simulation, actors: Collection[str]) -> float:
    """When the last of some actors was done."""
    return max((ran.end for ran in run.firings if ran.actor in actors), default=0.0)


def hidden(before: Network, run: Simulation) -> dict[str, float]:
    """By queue the time of added actors that lies within the span of the step as it was, and so costs none."""
    alone = simulate(before)
    known = {actor.name for actor in before.actors}
    found = dict.fromkeys(before.queues, 0.0)
    for ran in run.firings:
        if ran.actor not in known and ran.queue in found:
            found[ran.queue] += max(0.0, min(ran.end, alone.end) - ran.start)
    return found


def held_at_once(run: Simulation, places: Mapping[str, str]) -> dict[str, int]:
    """By place the most slots in use at once of all registers that lie there. `places` has that of each register.

    A slot is in use from the start of the firing that fills it to the end of the one that frees it.
    """
    network = run.network
    events: list[tuple[float, int, str]] = []
    for actor in network.actors:
        fired = [ran for ran in run.firings if ran.actor == actor.name]
        for give in actor.gives:
            mine = [ran for ran in fired if actor.active(give, ran.case)]
            events += [(ran.start, give.slots, give.register) for ran in mine[:: give.every]]
        for take in actor.takes:
            mine = [ran for ran in fired if actor.active(take, ran.case)]
            events += [(ran.end, -take.slots, take.register) for ran in mine[take.every - 1 :: take.every]]
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for _, change, register in sorted(events, key=lambda event: (event[0], event[1])):
        if register in places:
            place = places[register]
            now[place] = now.get(place, 0) + change
            most[place] = max(most.get(place, 0), now[place])
    return most
