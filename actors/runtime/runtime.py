"""The runtime: a network and the work of its actors, run a step at a time.

    with Runtime(network, {"F0": forward, "B0": backward, ...}) as runtime:
        outcome = runtime.run(record=True)

Work is called with the firing, which holds the values that it takes, and returns a value for each register that the
actor fills, None where there is none yet. A value is let go as soon as its slot is free. A case that is two tasks at
once, such as "F0&B1", is one call, and how the two take turns is up to the work.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import perf_counter
from typing import Any
from zlib import crc32

from ...placement.errors import ScheduleError
from ...placement.world import at_close
from ..protocol.network import Network
from ..protocol.simulate import Ran, Simulation, simulate
from .inline import InlineSteps
from .job import Job, Raw, Work
from .progress import Guard
from .static_order import fits
from .threads import ThreadedSteps

__all__ = ["RunRecord", "Runtime", "Work", "order_of", "settled"]


@dataclass(frozen=True)
class RunRecord:
    """The record of a step, with times of `perf_counter`."""

    network: Network
    raw: Sequence[Raw] = field(repr=False)
    start: float
    end: float

    @cached_property
    def firings(self) -> tuple[Ran, ...]:
        """The firings by start, where they were recorded. What was posted before the message ahead of it had gone
        begins with the end of that."""
        found: list[Ran] = []
        until: dict[str, float] = {}
        for at, case, label, start, end, more in self.raw:  # of one queue in order
            actor = self.network.actors[at]
            start = max(start, until.get(actor.queue, start))
            until[actor.queue] = end = max(start, end)
            found.append(Ran(actor.name, actor.cases[case], label, actor.queue, start, end, more))
        return tuple(sorted(found, key=lambda ran: ran.start))

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def of(self, queue: str) -> tuple[Ran, ...]:
        """The firings of a queue, in order."""
        return tuple(ran for ran in self.firings if ran.queue == queue)


def order_of(run: Simulation) -> dict[str, tuple[str, ...]]:
    """For each queue the actors that a simulation ran, in order: what a runtime can be held to."""
    found: dict[str, list[str]] = {}
    for ran in run.firings:
        found.setdefault(ran.queue, []).append(ran.actor)
    return {queue: tuple(names) for queue, names in found.items()}


def settled(run: Simulation) -> bool:
    """Whether marks and priorities lead to the order of a simulation whatever time things take. Two more simulations
    tell, in which each takes from a fifth to three times as long. If so, nothing is lost by holding on to the order."""
    expected = order_of(run)
    usual = {actor.name: (dict(actor.times), actor.time) for actor in run.network.actors}

    def other(draw: int) -> Simulation:
        def time(actor: str, case: str, label: int) -> float:
            times, one = usual[actor]
            drawn = crc32(f"{draw} {actor} {case} {label}".encode()) / (1 << 32)
            return (times.get(case, one) or 1.0) * (0.2 + 2.8 * drawn)

        return simulate(run.network, time=time)

    return all(order_of(other(draw)) == expected for draw in range(2))


class Runtime:
    """Runs a network again and again, a step each time. Its threads are made at first use and kept until `close`; where
    all is up to one queue there are none.

    `order` names, by queue, the actors that run in that order whatever becomes ready first: for schedules that leave
    the order open, and for queues that take part in collectives. `here` is the queue that the calling thread drives, by
    default the first. `initial` gives the values of slots that are filled at the start, by register. `guard` is the bus
    where the network goes on in other processes, and `answers` says, where all keep to an order, of each message that
    comes how much of what was sent is over then. `timeout` is in seconds without any progress, by default those of
    `flow.init(timeout=)` when a step begins.
    """

    def __init__(
        self,
        network: Network,
        work: Mapping[str, Work],
        *,
        order: Mapping[str, Sequence[str]] | None = None,
        here: str | None = None,
        initial: Mapping[str, Callable[[], Sequence[Any]]] | None = None,
        guard: Guard | None = None,
        answers: Mapping[str, Sequence[Mapping[str, int]]] | None = None,
        timeout: float | None = None,
        name: str = "",
    ) -> None:
        idle = [actor.name for actor in network.actors if actor.name not in work]
        if idle:
            raise ScheduleError(f"{network.name}: nothing says what {', '.join(idle)} shall do")
        if here is not None and here not in network.queues:
            raise ScheduleError(f"{network.name}: no queue is called {here!r}\n  there are {', '.join(network.queues)}")
        local = {queue: names for queue, names in (order or {}).items() if queue in network.queues}
        self.network = network
        self._job = Job(network, work, local, here, initial or {}, guard, answers or {}, timeout, name or network.name)
        self._steps: ThreadedSteps | InlineSteps | None = None
        self._end: Callable[[], object] | None = None
        mine = weakref.ref(self)
        at_close(lambda: _close(mine()))

    def run(self, *, record: bool = False) -> RunRecord:
        """One step: from the initial states until every actor has ended. The first error of any actor is raised."""
        steps = self._steps
        if steps is None:
            self._steps = steps = InlineSteps(self._job) if fits(self._job) else ThreadedSteps(self._job)
            self._end = weakref.finalize(self, steps.close)
        start = perf_counter()
        try:
            ran = steps.run(record)
        except BaseException:
            self.close()  # another try, if there is one, has new threads
            raise
        return RunRecord(self.network, ran, start, perf_counter())

    def close(self) -> None:
        """End the threads. A later run makes new ones."""
        end, self._end, self._steps = self._end, None, None
        if end is not None:
            end()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _close(runtime: Runtime | None) -> None:
    if runtime is not None:
        runtime.close()
