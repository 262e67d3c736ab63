"""The simulator: a network with a clock in the place of threads.

What happens at one instant is all told before anything new begins, so that order does not depend on who was told first.

Beside its own times a run keeps those of many others, if asked for: each firing takes another time in each of them, and
all have the order of the first. A firing begins there when its queue is free and what it waited for has come: what it
takes was filled, and what it gives was freed.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...placement.errors import ScheduleError
from .network import Network
from .protocol import Event, Message, Wiring
from .state import Desk, Firing, Slot

__all__ = ["Ran", "Seconds", "Simulation", "simulate"]

Seconds: TypeAlias = npt.NDArray[np.float64]  # of one thing, in each of many runs
Others: TypeAlias = Callable[[str, float], Seconds]  # of a firing on a queue, which takes so long in the first
SlotMakers: TypeAlias = tuple[tuple[str, int], ...]  # registers, and which firing filled a slot of each

SAME = 1e-9  # relative; what lies so near is one instant


@dataclass(frozen=True, slots=True)
class Ran:
    """One firing, and from when to when. `more` are the labels of what it did besides, where that was two at once."""

    actor: str
    case: str
    label: int
    queue: str
    start: float
    end: float
    more: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "&".join(f"{name}{label}" for name, label in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """The things that it did, each with its label: one, or two at once."""
        names = (self.case or self.actor).split("&") if self.more else [self.case or self.actor]
        return tuple(zip(names, (self.label, *self.more), strict=True))


@dataclass(frozen=True)
class Simulation:
    """The outcome of a simulation. `end` is when its last firing ended, also where none was recorded. `peak` is by
    register the most slots that were in use at once, `ends` are those of the other runs that were asked for. Else
    `sources` has for each firing the registers that it took something of, and the numbers of the firings that filled
    that; what lay there at the start is of none."""

    network: Network
    firings: tuple[Ran, ...]
    end: float
    peak: dict[str, int]
    finished: bool
    desk: Desk = field(repr=False)
    sources: tuple[SlotMakers, ...] = field(default=(), repr=False)
    ends: Seconds | None = field(default=None, repr=False)

    def of(self, queue: str) -> tuple[Ran, ...]:
        """The firings of a queue, in order."""
        return self._by_queue.get(queue, ())

    @cached_property
    def _by_queue(self) -> dict[str, tuple[Ran, ...]]:
        found: dict[str, list[Ran]] = defaultdict(list)
        for ran in self.firings:
            found[ran.queue].append(ran)
        return {queue: tuple(firings) for queue, firings in found.items()}

    def busy(self, queue: str) -> float:
        return sum(ran.end - ran.start for ran in self.of(queue))

    def span(self, queue: str) -> float:
        """From the first start to the last end."""
        ran = self.of(queue)
        return max(r.end for r in ran) - min(r.start for r in ran) if ran else 0.0


def simulate(
    network: Network,
    *,
    time: Callable[[str, str, int], float] | None = None,
    record: bool = True,
    others: Others | None = None,
) -> Simulation:
    """Run a network to its end, or to where nothing can go on. `time(actor, case, label)` overrides its times;
    `others(queue, seconds)` has those of a firing in many other runs of the same order."""
    wiring = Wiring(network)
    return _Clock(wiring, time, record, _OtherRuns(wiring, others) if others else None).run()


class _Edge(NamedTuple):
    """Where a slot goes that an actor fills: `every` is that of its give, `first` the number of the first slot."""

    register: str
    high: int
    first: int
    to: int
    every: int
    delay: float
    filled: Event
    end: Event


class _Came(NamedTuple):
    """When a slot was filled or freed. On its own `queue` nobody has to wait for it: what comes next comes later."""

    queue: str
    at: Seconds | float


class _OtherRuns:
    """The times of a network's other runs: when queues are free, and when slots were filled and freed."""

    def __init__(self, wiring: Wiring, seconds: Others) -> None:
        self.wiring, self.seconds = wiring, seconds
        self.free: dict[str, Seconds | float] = defaultdict(float)  # by queue
        self.done = [_Came("", 0.0)] * len(wiring.actors)  # the last firing of each actor
        self.credits = [[deque[_Came | None]([None] * n) for n in wired.first.credits] for wired in wiring.actors]

    def fire(self, firing: Firing, fired: int, long: float, left: list[deque[Slot]]) -> None:
        """Time a firing of an actor, its so many-th; slots that lie there and are not taken are `left`."""
        at, wired = firing.actor, self.wiring.actors[firing.actor]
        waits: list[_Came | None] = []
        for port, _, _, low, _ in wired.takes[firing.case]:
            waits += [slot.value for slot in firing.held[port]]
            if 0 < low <= len(left[port]):
                waits.append(left[port][low - 1].value)
        for port, slots, every, _, _ in wired.outs[firing.case]:
            if every == 1 or wired.turn(True, port, fired) % every == 0:
                waits += [self.credits[at][port].popleft() for _ in range(slots)]
        queue = wired.actor.queue
        start = self.free[queue]
        for came in waits:
            if came is not None and came.queue != queue:
                start = np.maximum(start, came.at)
        self.free[queue] = end = start + self.seconds(queue, long) if long else start
        self.done[at] = _Came(queue, end)

    def freed(self, at: int, to: int, event: Event) -> None:
        """Give back slots that an actor has read."""
        self.credits[to][event.port].extend([self.done[at]] * event.slots)

    def filled(self, at: int, slots: tuple[Slot, ...], delay: float) -> tuple[Slot, ...]:
        """The slots that an actor fills, with the times when they come."""
        came = _Came("", self.done[at].at + delay) if delay else self.done[at]
        return tuple([Slot(slot.label, came) for slot in slots])

    @property
    def last(self) -> Seconds | None:
        """The times when all is done."""
        found: Seconds | float = 0.0
        for end in self.free.values():
            found = np.maximum(found, end)
        return found if isinstance(found, np.ndarray) else None


class _Clock:
    def __init__(
        self,
        wiring: Wiring,
        time: Callable[[str, str, int], float] | None,
        record: bool,
        others: _OtherRuns | None,
    ) -> None:
        self.wiring, self.desk, self.record, self.time, self.others = wiring, Desk(wiring), record, time, others
        network = wiring.network
        self.busy = [False] * len(network.queues)
        self.heap: list[tuple[float, int, int, Event | None, tuple[Slot, ...]]] = []
        self.order = count()
        self.ran: list[Ran] = []
        self.sources: list[SlotMakers] = []
        self.under_way = [-1] * len(network.actors)  # the number of the last firing of each actor
        self.registers = [[take.register for take in actor.takes] for actor in network.actors]
        self.unsent: list[tuple[int, tuple[Message, ...]]] = []
        self.times = [[dict(actor.times).get(case, actor.time) for case in actor.cases] for actor in network.actors]
        self.edges = [self._edges(at) for at in range(len(network.actors))]
        self.freed = [
            [(to, Event("freed", out, take.slots)) for (to, out), take in zip(edges, actor.takes, strict=True)]
            for edges, actor in zip(wiring.producer, network.actors, strict=True)
        ]
        self.peak = {r.name: r.initial for r in network.registers}
        self.last = 0.0

    def _edges(self, at: int) -> list[_Edge]:
        wired, network = self.wiring.actors[at], self.wiring.network
        made = []
        for (to, take), give in zip(self.wiring.consumer[at], wired.give, strict=True):
            given = wired.actor.gives[give]
            r = network.register(given.register)
            events = Event("filled", take, given.slots), Event("end", take)
            made.append(_Edge(r.name, r.high, r.initial, to, given.every, r.delay, *events))
        return made

    def run(self) -> Simulation:
        network, heap = self.wiring.network, self.heap
        now = 0.0
        self.begin(now)
        while heap:
            now = heap[0][0]
            limit = now + SAME * max(1.0, now)
            while heap and heap[0][0] <= limit:
                _, _, at, event, slots = heappop(heap)
                if event is None:
                    self.busy[self.desk.queue[at]] = False
                    self.post(at, self.desk.done(at), now)
                else:
                    self.tell(at, event, slots)
                while self.unsent:
                    self.post(*self.unsent.pop(), now)
            self.begin(now)
        ends = None if self.others is None else self.others.last
        sources = tuple(self.sources)
        return Simulation(network, tuple(self.ran), self.last, self.peak, self.desk.ended, self.desk, sources, ends)

    def begin(self, now: float) -> None:
        """Start what can start."""
        desk, busy = self.desk, self.busy
        for queue, ready in enumerate(desk.ready):
            if ready and not busy[queue]:
                at = desk.next(queue)
                assert at is not None
                firing = desk.fire(at)
                _, case, label, _, _, more = firing
                busy[queue] = True
                long = self.times[at][case]
                if self.record or self.time is not None:
                    actor = self.wiring.actors[at].actor
                    if self.time is not None:
                        long = self.time(actor.name, actor.cases[case], label)
                        if not 0 <= long < inf:
                            what = f"{self.wiring.network.name}: {actor.name} takes {long} for {label}"
                            raise ScheduleError(f"{what}\n  times are 0 or more, and have an end")
                    if self.record:
                        self.under_way[at] = len(self.ran)
                        if self.others is None:
                            self.sources.append(self._sources(at, firing))
                        self.ran.append(Ran(actor.name, actor.cases[case], label, actor.queue, now, now + long, more))
                end = now + long
                if self.others is not None:
                    self.others.fire(firing, desk.states[at].fired, long, desk.slots[at])
                for edge, credits in zip(self.edges[at], desk.states[at].credits, strict=True):
                    if edge.high - credits > self.peak[edge.register]:
                        self.peak[edge.register] = edge.high - credits
                if end > self.last:
                    self.last = end
                heappush(self.heap, (end, next(self.order), at, None, ()))

    def _sources(self, at: int, firing: Firing) -> SlotMakers:
        """Whose slots a firing has, each once."""
        every = zip(self.registers[at], firing.held, strict=True)
        found = [(register, slot.value) for register, slots in every for slot in slots if slot.value is not None]
        return tuple(found) if len(found) < 2 else tuple(dict.fromkeys(found))

    def tell(self, at: int, event: Event, slots: tuple[Slot, ...] = ()) -> None:
        if slots:
            self.desk.slots[at][event.port].extend(slots)
        messages = self.desk.tell(at, event)
        if messages:
            self.unsent.append((at, messages))

    def post(self, at: int, messages: tuple[Message, ...], now: float) -> None:
        """Carry messages: at once, or as long as their register takes."""
        for kind, port, slots in messages:
            if kind == "freed":
                to, event = self.freed[at][port]
                if to >= 0 and self.others is not None:
                    self.others.freed(at, to, event)
                if to >= 0 and (more := self.desk.tell(to, event)):
                    self.unsent.append((to, more))
                continue
            edge = self.edges[at][port]
            event, filled = edge.end, _NONE
            if kind == "filled":
                first = edge.first + self.desk.label(at, port) // edge.every * slots
                event = edge.filled
                if self.others is not None:
                    filled = self.others.filled(at, _numbered(first, slots), edge.delay)
                elif self.record:
                    filled = tuple([Slot(first + n, self.under_way[at]) for n in range(slots)])
                else:
                    filled = _numbered(first, slots)
            if edge.delay:
                heappush(self.heap, (now + edge.delay, next(self.order), edge.to, event, filled))
            else:
                self.tell(edge.to, event, filled)


_NONE: tuple[Slot, ...] = ()


@lru_cache(maxsize=4096)
def _numbered(first: int, slots: int) -> tuple[Slot, ...]:
    return tuple([Slot(first + n) for n in range(slots)])


def orders(run: Simulation) -> dict[str, str]:
    """For each queue what it ran, in words."""
    found: dict[str, list[str]] = defaultdict(list)
    for ran in run.firings:
        found[ran.queue].append(str(ran))
    return {queue: " ".join(words) for queue, words in found.items()}
