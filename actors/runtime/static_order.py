"""A static order: a step of one queue as a list, run from first to last, with all it sends and receives.

Where one queue goes by an order, or is alone, nothing is left to decide: what it does next, what it has to wait for and
which slot holds what is the same in every step. So the protocol runs once, without values, and what it did is written
down; a step then only follows. The calling thread does everything: it posts what travels as soon as a slot is filled or
freed, and waits for a message where the order needs it.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from ..protocol.protocol import Event, Message, Wiring
from ..protocol.state import Desk, Firing, Slot
from .channel import Receive, Send
from .job import Job, Work

__all__ = ["Cell", "OrderedFiring", "StaticOrder", "fits"]

Cell: TypeAlias = int  # where the value of a slot lies in a step


class OrderedFiring(NamedTuple):
    """A firing, and what follows it."""

    firing: Firing  # whose slots hold cells in the place of values
    work: Work
    link: Send | Receive | None  # where it is the wait for a message
    width: int  # of what the work gives
    fills: tuple[tuple[int, int, Cell], ...]  # what it gives, which of several slots at once or -1, and the cell for it
    sends: tuple[tuple[Send, int, Cell], ...]  # what is posted then, with its label
    receives: tuple[tuple[Receive, int, int], ...]  # with how many came, and for how many more there are slots
    drops: tuple[Cell, ...]  # whose value nobody needs any more


def fits(job: Job) -> bool:
    """Whether all is up to one queue: the others only send and receive for it, and it goes by an order then."""
    network = job.network
    if any(isinstance(work, Receive) and getattr(work.link, "pulls", False) for work in job.work.values()):
        return False  # what is sent to it is only taken by a thread that waits for it
    links = {actor.queue for actor in network.actors if isinstance(job.work[actor.name], Send | Receive)}
    homes = {actor.queue for actor in network.actors if not isinstance(job.work[actor.name], Send | Receive)}
    if len(homes) != 1 or homes & links or job.here not in (None, *homes):
        return False
    return not links or homes <= job.order.keys()


class StaticOrder:
    """A step of one queue, written down: all of it, or the first `most` firings and the next one begun."""

    def __init__(self, job: Job, most: int | None = None) -> None:
        network = job.network
        self.wiring = Wiring(network)
        self.desk = Desk(self.wiring)
        self.work = [job.work[actor.name] for actor in network.actors]
        self.links = [work for work in self.work if isinstance(work, Send | Receive)]
        pairs = zip(network.actors, self.work, strict=True)
        home = next(actor.queue for actor, work in pairs if not isinstance(work, Send | Receive))
        self.home = network.queues.index(home)
        self.order = [self.wiring.number[name] for name in job.order[home]] if home in job.order else None
        self.answers = job.answers
        self.turn = 0  # how much of the order is done
        self.readers: list[int] = []  # of each cell, those that have not freed it
        self.asked = [(0, 0)] * len(self.work)  # how many a receive got, and for how many more there were slots
        self.over: dict[int, int] = {}  # of those that send: how much is known to be taken, and not waited for yet
        self.initial = self.filled()
        self.first = self.ask()
        self.entries: list[OrderedFiring] = []
        while (at := self.pick()) is not None:
            if len(self.entries) == most:
                self.desk.fire(at)
                break
            self.entries.append(self.entry(at))

    def filled(self) -> dict[str, list[Cell]]:
        """Cells for the slots that are filled at the start."""
        network = self.wiring.network
        made = {r.name: [self.cell() for _ in range(r.initial)] for r in network.registers if r.initial}
        for at, actor in enumerate(network.actors):
            for port, take in enumerate(actor.takes):
                cells = made.get(take.register, [])
                self.desk.slots[at][port].clear()
                self.desk.slots[at][port].extend([Slot(n, cell) for n, cell in enumerate(cells)])
                for cell in cells:
                    self.readers[cell] += 1
        return made

    def cell(self) -> Cell:
        self.readers.append(0)
        return len(self.readers) - 1

    def pick(self) -> int | None:
        """The next thing to do: what the order says, or what that waits for; behind it all, the waits that are left."""
        ready, queue = self.desk.ready, self.desk.queue
        if self.order is None:
            return self.desk.next(self.home)
        if self.turn == len(self.order):
            return next((at for at, q in enumerate(queue) if q != self.home and at in ready[q]), None)
        for at, over in self.over.items():
            if self.desk.states[at].fired < over and at in ready[queue[at]]:
                return at  # the wait for it is over at once, and what it holds is let go
        at = self.order[self.turn]
        if at in ready[self.home]:
            self.turn += 1
            return at
        return next((by for by in self.lacks(at) if queue[by] != self.home and by in ready[queue[by]]), None)

    def lacks(self, at: int) -> Iterator[int]:
        """The actors that have still to fill or to free what a firing needs."""
        wired, state = self.wiring.actors[at], self.desk.states[at]
        fired, case = state.fired, wired.case(state.fired)
        for take in wired.takes[case]:
            port, _, every, _, _ = take
            if state.have[port] < wired.needed(take, fired) and (
                every == 1 or wired.turn(False, port, fired) % every == 0
            ):
                yield self.wiring.producer[at][port][0]
        for port, slots, every, _, _ in wired.outs[case]:
            if state.credits[port] < slots and (every == 1 or wired.turn(True, port, fired) % every == 0):
                yield self.wiring.consumer[at][port][0]

    def entry(self, at: int) -> OrderedFiring:
        """Fire an actor, and write down what that does."""
        desk, wired = self.desk, self.wiring.actors[at]
        firing, network = desk.fire(at), self.wiring.network
        fills: dict[int, list[Cell]] = {}
        sends: list[tuple[Send, int, Cell]] = []
        drops: list[Cell] = []
        for message in (messages := desk.done(at)):
            if message.kind == "freed" and not isinstance(self.work[at], Send):
                for slot in firing.held[message.port]:
                    self.readers[slot.value] -= 1
                    if not self.readers[slot.value]:
                        drops.append(slot.value)
            elif message.kind == "filled":
                number = wired.give[message.port]
                give = wired.actor.gives[number]
                first = (
                    network.register(give.register).initial + desk.label(at, message.port) // give.every * message.slots
                )
                if number not in fills:
                    fills[number] = [self.cell() for _ in range(message.slots)]
                to, take = self.wiring.consumer[at][message.port]
                reader = self.work[to]
                for label, cell in enumerate(fills[number], first):
                    desk.slots[to][take].append(Slot(label, cell))
                    if isinstance(reader, Send):
                        sends.append((reader, label, cell))  # a message under way keeps what it needs itself
                    else:
                        self.readers[cell] += 1
        drops += [cell for cells in fills.values() for cell in cells if not self.readers[cell]]
        self.carry(at, messages)
        given = [
            (number, n if len(cells) > 1 else -1, cell)
            for number, cells in fills.items()
            for n, cell in enumerate(cells)
        ]
        work = self.work[at]
        if isinstance(work, Receive):
            self.answered(wired.actor.name, firing.turn)
            firing = firing._replace(label=firing.turn, held=())  # which is waited for in the order in which it comes
        link = work if isinstance(work, Send | Receive) else None
        if isinstance(work, Send):
            firing = firing._replace(held=())  # it was posted when the slot was filled
        width = len(wired.actor.gives)
        return OrderedFiring(firing, work, link, width, tuple(given), tuple(sends), self.ask(), tuple(drops))

    def answered(self, actor: str, turn: int) -> None:
        """Note what the arrival of a message says of those that were sent."""
        known = self.answers.get(actor, ())
        for name, over in known[turn].items() if turn < len(known) else ():
            at = self.wiring.number[name]
            self.over[at] = max(over, self.over.get(at, 0))

    def carry(self, at: int, messages: tuple[Message, ...]) -> None:
        for kind, port, slots in messages:
            to, there = (self.wiring.producer if kind == "freed" else self.wiring.consumer)[at][port]
            if to >= 0:
                self.carry(to, self.desk.tell(to, Event(kind, there, slots)))

    def ask(self) -> tuple[tuple[Receive, int, int], ...]:
        """The receives of which more can be posted now."""
        found = []
        for at, work in enumerate(self.work):
            if isinstance(work, Receive):
                state = self.desk.states[at]
                more = state.fired, min(state.credits, default=0)
                if more[1] and more != self.asked[at]:
                    self.asked[at] = more
                    found.append((work, *more))
        return tuple(found)
