"""The state of a process or a simulation: the states of its actors, what their slots hold, and who runs next.

It applies the protocol's messages and keeps, for each queue, the actors that are ready. It has no clock and no thread;
whoever drives it says what begins and what is done, and carries messages that travel.
"""

from collections import deque
from functools import partial
from typing import Any, NamedTuple

from .network import Take
from .protocol import Event, Message, Wiring, step

__all__ = ["Desk", "Firing", "Slot"]


class Slot(NamedTuple):
    """The content of a filled slot: its number in the register's own stream, and the value."""

    label: int
    value: Any = None


class Firing(NamedTuple):
    """One firing: `label` is the number of what it works on, for a layer's forward the micro-batch. Of a case that is
    two things at once it is that of the first, and `more` are those of the others."""

    actor: int
    case: int
    label: int
    turn: int  # of this case, or of the actor where it has one case; of two things at once that of the first
    held: tuple[tuple[Slot, ...], ...]  # for each take of the actor; empty where it is not of this case
    more: tuple[int, ...] = ()


class Desk:
    """The states of all actors of a network, and what they hold. Messages are returned; who drives it carries them."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        network = wiring.network
        self.states = wiring.states()
        number = {queue: n for n, queue in enumerate(network.queues)}
        self.queue = [number[actor.queue] for actor in network.actors]
        self.ready: list[set[int]] = [set() for _ in network.queues]
        self.slots: list[list[deque[Slot]]] = [
            [deque(Slot(n) for n in range(network.register(take.register).initial)) for take in actor.takes]
            for actor in network.actors
        ]
        self.held: list[list[tuple[Slot, ...]]] = [[()] * len(actor.takes) for actor in network.actors]
        self.turns: list[list[int]] = [[0] * len(actor.parts) for actor in network.actors]
        self.labels: list[tuple[int, ...]] = [(0,)] * len(network.actors)  # of the firing under way, part by part
        self.cases = [0] * len(network.actors)  # of it
        self._other = [[take if take.lifo or take.skips else None for take in actor.takes] for actor in network.actors]
        for at, state in enumerate(self.states):
            if state.phase == "ready":
                self.ready[self.queue[at]].add(at)

    def next(self, queue: int) -> int | None:
        """The ready actor that goes first."""
        ready = self.ready[queue]
        if len(ready) < 2:
            return next(iter(ready), None)
        actors, states = self.wiring.actors, self.states
        return min(ready, key=lambda at: (actors[at].actor.key(states[at].fired), at))

    def fire(self, at: int) -> Firing:
        """Begin a firing; what it takes is held until it is done."""
        wired, state = self.wiring.actors[at], self.states[at]
        self.states[at], _ = step(wired, state, _FIRE)
        self.ready[self.queue[at]].discard(at)
        fired, turns = state.fired, self.turns[at]
        case = wired.case(fired)
        parts = wired.parts[case]
        turn = turns[parts[0]]
        labels = [turns[part] for part in parts]
        for part in parts:
            turns[part] += 1
        kept, slots, other = self.held[at], self.slots[at], self._other[at]
        held: list[tuple[Slot, ...]] = [()] * len(kept)
        takes = wired.takes[case]
        for port, count, every, _, part in reversed(takes):
            if every == 1 or wired.turn(False, port, fired) % every == 0:
                pop = slots[port].popleft
                if (take := other[port]) is not None:
                    pop = (
                        slots[port].pop
                        if take.lifo
                        else partial(_left, slots[port], take, wired.turn(False, port, fired))
                    )
                kept[port] = (pop(),) if count == 1 else tuple([pop() for _ in range(count)])
            held[port] = kept[port]
            label = held[port][0].label // count * every  # that of its first take is the number of a part
            if every > 1:
                label += wired.turn(False, port, fired) % every
            labels[part] = label
        self.labels[at], self.cases[at] = tuple(labels), case
        return _new(Firing, (at, case, labels[0], turn, tuple(held), tuple(labels[1:])))

    def label(self, at: int, out: int) -> int:
        """The number of what an actor fills an out edge with, by the firing under way or the last."""
        labels = self.labels[at]
        return labels[0] if len(labels) == 1 else labels[self.wiring.actors[at].filler[self.cases[at]][out]]

    def done(self, at: int) -> tuple[Message, ...]:
        """End the firing under way; the messages that this sends."""
        state, messages = step(self.wiring.actors[at], self.states[at], _DONE)
        self.states[at] = state
        if state.phase == "ready":
            self.ready[self.queue[at]].add(at)
        for kind, port, _ in messages:
            if kind == "freed":
                self.held[at][port] = ()
        return messages

    def tell(self, at: int, event: Event) -> tuple[Message, ...]:
        """Give an actor a message; the messages that this sends in turn."""
        self.states[at], messages = step(self.wiring.actors[at], self.states[at], event)
        if self.states[at].phase == "ready":
            self.ready[self.queue[at]].add(at)
        return messages

    @property
    def ended(self) -> bool:
        return all(state.phase == "ended" for state in self.states)


def _left(slots: deque[Slot], take: Take, turn: int) -> Slot:
    """Take what lies behind those slots that are skipped."""
    at = take.skips[turn] if turn < len(take.skips) else 0
    slot = slots[at]
    del slots[at]
    return slot


_FIRE, _DONE = Event("fire"), Event("done")
_new = tuple.__new__  # half as long as Firing(...)
