"""Actors that meet at every tick of the simulation, and a clock of events: tests of runtimes that look at no other.

In a simulated run all times are whole ticks. Whatever runs during the same tick waits here for each other, so a runtime
in which one thing goes before another that the simulation does at the same time never comes to an end.
"""

from collections import Counter
from collections.abc import Callable
from threading import Barrier
from typing import TypeAlias

from sbpflow.actors.protocol.network import Actor
from sbpflow.actors.protocol.simulate import Simulation
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime.job import Work

__all__ = ["LIMIT", "Clock", "Meet", "meeting", "threads_meet"]

LIMIT = 30.0  # seconds after which those who are awaited will not come
Meet: TypeAlias = Callable[[int, int], None]  # with so many, at this tick


def meeting(run: Simulation, meet: Meet, *, tick: float = 1.0) -> dict[str, Work]:
    """Every actor's work: at each tick of a firing to meet all that is at work in it."""
    spans = {
        (ran.actor, ran.case, ran.label): range(round(ran.start / tick), round(ran.end / tick)) for ran in run.firings
    }
    parties = Counter(at for span in spans.values() for at in span)

    def work(actor: Actor) -> Work:
        def gather(firing: Firing) -> None:
            for at in spans[actor.name, actor.cases[firing.case], firing.label]:
                meet(parties[at], at)

        return gather

    return {actor.name: work(actor) for actor in run.network.actors}


def threads_meet() -> Meet:
    barriers: dict[int, Barrier] = {}

    def meet(parties: int, at: int) -> None:
        barriers.setdefault(at, Barrier(parties)).wait(LIMIT)

    return meet


class Clock:
    """The time of the watch over steps. It stands until the test lets it go, and then goes on with each look: a busy
    machine makes nothing late.

    >>> clock = Clock(0.1)
    >>> clock(), clock()
    (0.0, 0.0)
    >>> clock.goes = True
    >>> clock(), clock()
    (0.1, 0.2)
    """

    def __init__(self, step: float) -> None:
        self.step, self.now, self.goes = step, 0.0, False

    def __call__(self) -> float:
        self.now += self.step * self.goes
        return self.now
