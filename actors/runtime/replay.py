"""Records of a step, replayed on its network: what each firing took and from whom, and what it waited for.

Records say when each firing began and ended. The replay runs the protocol's table in that order, and so knows which
slots each firing held, how many were in use, and which message was the last that it waited for.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from ..protocol.network import Network
from ..protocol.protocol import Event, Message, Wiring
from ..protocol.simulate import SAME, Ran
from ..protocol.state import Desk, Slot

__all__ = ["Cause", "Did", "Replay"]


class Cause(NamedTuple):
    """The message that made an actor ready: `by` is the number of the firing that sent it.

    `filled` and `freed` concern a slot of a register; `done` is the end of the actor's own firing before.
    """

    kind: Literal["filled", "freed", "done"]
    register: str
    by: int


@dataclass(frozen=True, slots=True)
class Did:
    """A record with what the replay found. `takes` and `gives` count the slots of each register in use at its start."""

    ran: Ran
    rank: int
    placed: bool = False  # False: the protocol would never have begun it
    takes: tuple[tuple[str, int], ...] = ()
    gives: tuple[tuple[str, int], ...] = ()
    bytes: int = 0  # of the slots that it filled
    sources: tuple[tuple[str, int], ...] = ()  # registers, and the numbers of the firings that filled what it took
    ready: float | None = None  # None: from the start
    cause: Cause | None = None

    @property
    def early(self) -> float:
        """The time by which it ran before the protocol allowed it; more than noise means clocks that differ."""
        return 0.0 if self.ready is None else max(0.0, self.ready - self.ran.start)

    def __str__(self) -> str:
        return " & ".join(f"{name} micro-batch {label}" for name, label in self.ran.parts)


class Replay:
    """The desk, driven by records. What a clock that is off puts too early waits until the protocol lets it begin."""

    def __init__(self, network: Network, records: Sequence[tuple[int, Ran]]) -> None:
        self.wiring, self.network = Wiring(network), network
        self.desk = Desk(self.wiring)
        self.done = [Did(ran, rank) for rank, ran in sorted(records, key=lambda r: (r[1].start, r[1].end))]
        first = min((ran.start for _, ran in records), default=0.0)
        self.levels: list[tuple[float, str, int]] = [(first, r.name, r.initial) for r in network.registers]
        self.ready: dict[int, tuple[float, Cause]] = {}
        self.waiting: dict[int, deque[int]] = defaultdict(deque)
        self.over: set[int] = set()  # ended by the clock, and not yet begun by the protocol
        self.edges: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at, wired in enumerate(self.wiring.actors):
            for out, give in enumerate(wired.give):
                self.edges[wired.actor.gives[give].register].append((at, out))
        self.live = {
            (at, out): network.register(name).initial for name, edges in self.edges.items() for at, out in edges
        }
        self.run()

    def run(self) -> None:
        number = self.wiring.number
        first = min((did.ran.start for did in self.done), default=0.0)
        grain = SAME * max((did.ran.end - first for did in self.done), default=0.0) or 1.0
        ends = [(round((did.ran.end - first) / grain), 0, n) for n, did in enumerate(self.done)]
        starts = [(round((did.ran.start - first) / grain), 1, n) for n, did in enumerate(self.done)]
        for _, begins, n in sorted(ends + starts):
            if begins:
                self.waiting[number[self.done[n].ran.actor]].append(n)
            elif self.done[n].placed:
                self.finish(n)
            else:
                self.over.add(n)
            while any(self.begin(at) for at in list(self.waiting)):
                continue

    def begin(self, at: int) -> bool:
        """Begin the oldest record of an actor, if the protocol lets it."""
        n, wired, state = self.waiting[at][0], self.wiring.actors[at], self.desk.states[at]
        ran = self.done[n].ran
        if state.phase != "ready" or wired.actor.cases[wired.case(state.fired)] != ran.case:
            return False
        firing = self.desk.fire(at)
        case = firing.case
        ready, cause = self.ready.get(at, (None, None))
        took = [wired.actor.takes[port.at].register for port in wired.takes[case]]
        gave = [wired.actor.gives[wired.give[port.at]].register for port in wired.outs[case]]
        sources = [
            (wired.actor.takes[port].register, slot.value)
            for port, slots in enumerate(firing.held)
            for slot in slots
            if slot.value is not None
        ]
        self.done[n] = replace(
            self.done[n], placed=True, takes=self._used(took), gives=self._used(gave),
            sources=tuple(dict.fromkeys(sources)), ready=ready, cause=cause,
        )  # fmt: skip
        self.waiting[at].popleft()
        if not self.waiting[at]:
            del self.waiting[at]
        if n in self.over:
            self.finish(n)
        return True

    def _used(self, registers: list[str]) -> tuple[tuple[str, int], ...]:
        def used(name: str) -> int:
            register = self.network.register(name)
            return max(
                (register.high - self.desk.states[at].credits[out] for at, out in self.edges[name]),
                default=register.initial,
            )

        return tuple((name, used(name)) for name in dict.fromkeys(registers))

    def finish(self, n: int) -> None:
        at = self.wiring.number[self.done[n].ran.actor]
        messages = self.desk.done(at)
        if self.desk.states[at].phase == "ready":
            self.ready[at] = self.done[n].ran.end, Cause("done", "", n)
        filled = {m.port: m.slots for m in messages if m.kind == "filled"}
        wired = self.wiring.actors[at]
        sizes = {wired.actor.gives[wired.give[port]].register: slots for port, slots in filled.items()}
        moved = sum(self.network.register(name).bytes * slots for name, slots in sizes.items())
        self.done[n] = replace(self.done[n], bytes=moved)
        unsent = [(at, messages)]
        while unsent:
            unsent += self.post(*unsent.pop(), n)

    def post(self, at: int, messages: tuple[Message, ...], n: int) -> Iterator[tuple[int, tuple[Message, ...]]]:
        """Carry messages; what they make others say comes back."""
        for kind, port, slots in messages:
            if kind == "freed":
                register = self.wiring.actors[at].actor.takes[port].register
                to, out = self.wiring.producer[at][port]
                if to >= 0:
                    self.level(register, (to, out), -slots, n)
                    yield to, self.tell(to, Event("freed", out, slots), register, n)
                continue
            wired = self.wiring.actors[at]
            give = wired.actor.gives[wired.give[port]]
            to, take = self.wiring.consumer[at][port]
            if kind == "filled":
                self.level(give.register, (at, port), slots, n)
                first = self.desk.label(at, port) // give.every * slots
                self.desk.slots[to][take].extend(Slot(first + k, n) for k in range(slots))
            yield to, self.tell(to, Event(kind, take, slots), give.register, n)

    def tell(self, to: int, event: Event, register: str, n: int) -> tuple[Message, ...]:
        before = self.desk.states[to].phase
        messages = self.desk.tell(to, event)
        if before == "waiting" and self.desk.states[to].phase == "ready":
            kind: Literal["filled", "freed"] = "freed" if event.kind == "freed" else "filled"
            self.ready[to] = self.done[n].ran.end, Cause(kind, register, n)
        return messages

    def level(self, register: str, edge: tuple[int, int], change: int, n: int) -> None:
        """Filled slots of a register: those that its slowest reader has not freed."""
        self.live[edge] += change
        self.levels.append((self.done[n].ran.end, register, max(self.live[e] for e in self.edges[register])))
