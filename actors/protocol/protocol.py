"""The protocol: what an actor does on each message, as a table and a pure step.

    filled, freed, end     come from other actors: a slot to read, a slot to write, no more slots
    fire, done             come from the queue that runs it: begin, finished

An actor waits until everything that its next firing takes is filled and everything it gives is free; then it is ready.
When it is done it tells its consumers `filled` and its producers `freed`. When something it takes has ended, so has it.
The runtime and the simulator run this one table, the first with threads and the second with a clock.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from ...placement.errors import ScheduleError
from .network import Actor, Give, Network, Take

__all__ = ["NEXT", "Event", "MessageKind", "Message", "Phase", "ActorState", "Wired", "Wiring", "step"]

Phase: TypeAlias = Literal["waiting", "ready", "running", "ended"]
MessageKind: TypeAlias = Literal["filled", "freed", "end", "fire", "done"]

# Where a message can lead; which of several, the slots decide.
NEXT: dict[tuple[Phase, MessageKind], tuple[Phase, ...]] = {
    ("waiting", "filled"): ("waiting", "ready"),
    ("waiting", "freed"): ("waiting", "ready"),
    ("waiting", "end"): ("waiting", "ready", "ended"),
    ("ready", "filled"): ("ready",),
    ("ready", "freed"): ("ready",),
    ("ready", "end"): ("ready",),
    ("ready", "fire"): ("running",),
    ("running", "filled"): ("running",),
    ("running", "freed"): ("running",),
    ("running", "end"): ("running",),
    ("running", "done"): ("waiting", "ready", "ended"),
    ("ended", "filled"): ("ended",),
    ("ended", "freed"): ("ended",),
    ("ended", "end"): ("ended",),
}


class Event(NamedTuple):
    """A message as an actor gets it: `port` counts its takes (filled, end) or its out edges (freed)."""

    kind: MessageKind
    port: int = 0
    slots: int = 0


class Message(NamedTuple):
    """A message as an actor sends it: `port` counts its out edges (filled, end) or its takes (freed)."""

    kind: MessageKind
    port: int
    slots: int = 0


class ActorState(NamedTuple):
    """An actor between two messages. `have` counts filled slots for each take, `credits` free ones for each out edge;
    what a firing under way took and reserved is not in them."""

    phase: Phase
    fired: int
    have: tuple[int, ...]
    ended: tuple[bool, ...]
    credits: tuple[int, ...]


class Port(NamedTuple):
    """A take or an out edge as a case sees it, and which part of the case uses it."""

    at: int
    slots: int
    every: int
    low: int = 0
    part: int = 0


class Wired:
    """An actor with its edges: one for each consumer of each register it fills."""

    def __init__(
        self, actor: Actor, outs: tuple[tuple[Give, int], ...], initial: tuple[int, ...], ended: tuple[bool, ...] = ()
    ) -> None:
        self.actor = actor
        self.sequence = tuple(actor.cases.index(case) for case in actor.sequence) or (0,)
        self.round = len(self.sequence)
        lows = [(take, max((take.low, *take.skips))) for take in actor.takes]  # at most
        self.takes = tuple(_ports(actor, lows, case) for case in actor.cases)
        self.outs = tuple(_ports(actor, [(give, 0) for give, _ in outs], case) for case in actor.cases)
        self.give = tuple(actor.gives.index(give) for give, _ in outs)  # of every out edge
        self.parts = tuple(tuple(actor.parts.index(part) for part in case.split("&")) for case in actor.cases)
        # Of every out edge, by case, which part of it fills that.
        self.filler = tuple(tuple(_part(give, case) for give, _ in outs) for case in actor.cases)
        self.limit = actor.firings or inf
        self.grouped = any(take.every > 1 for take in actor.takes) or any(give.every > 1 for give in actor.gives)
        self.told = tuple(map(_told, self.outs, self.takes))
        credits = tuple(high for _, high in outs)
        ended = ended or (False,) * len(initial)
        self.first = ActorState(_phase(self, 0, initial, ended, credits), 0, initial, ended, credits)

    def needed(self, port: Port, fired: int) -> int:
        """The number of slots that must be filled for a take to begin at this firing, with those that it leaves
        lying."""
        skips = self.actor.takes[port.at].skips
        if skips:
            turn = self.turn(False, port.at, fired)
            return 1 + (skips[turn] if turn < len(skips) else 0)
        return port.slots + port.low

    def case(self, fired: int) -> int:
        return self.sequence[fired % self.round]

    def turn(self, out: bool, at: int, fired: int) -> int:
        """The number of firings before this one that the port took part in."""
        rounds, rest = divmod(fired, self.round)
        counts = self._counts[out][at]
        return rounds * counts[-1] + counts[rest]

    @cached_property
    def _counts(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each port, in how many of the first n firings of a round it takes part."""
        actor = self.actor

        def counts(port: Take | Give) -> list[int]:
            return [*accumulate((actor.active(port, case) for case in actor.sequence or ("",)), initial=0)]

        return [counts(take) for take in actor.takes], [counts(actor.gives[give]) for give in self.give]


def _ports(actor: Actor, listed: "Sequence[tuple[Take | Give, int]]", case: str) -> tuple[Port, ...]:
    return tuple(
        Port(at, port.slots, port.every, low, _part(port, case))
        for at, (port, low) in enumerate(listed)
        if actor.active(port, case)
    )


def _part(port: Take | Give, case: str) -> int:
    """The part of a case that a port is of; the first has those of the whole case, or of none."""
    parts = case.split("&")
    return parts.index(port.case) if port.case in parts else 0


def _told(outs: tuple[Port, ...], takes: tuple[Port, ...]) -> tuple[Message, ...]:
    """The messages at the end of a firing of a case, were it the last of every group."""
    filled = (Message("filled", port.at, port.slots) for port in outs)
    return (*filled, *(Message("freed", port.at, port.slots) for port in takes))


class Wiring:
    """All actors of a network, and where each message goes."""

    def __init__(self, network: Network) -> None:
        self.network = network
        number = {actor.name: at for at, actor in enumerate(network.actors)}
        self.number = number
        readers: dict[str, list[tuple[int, int]]] = {}
        for actor in network.actors:
            for at, take in enumerate(actor.takes):
                readers.setdefault(take.register, []).append((number[actor.name], at))
        self.actors: list[Wired] = []
        self.consumer: list[list[tuple[int, int]]] = []  # by actor and out edge: actor and take
        self.producer: list[list[tuple[int, int]]] = [[(-1, 0)] * len(a.takes) for a in network.actors]
        for at, actor in enumerate(network.actors):
            outs: list[tuple[Give, int]] = []
            to: list[tuple[int, int]] = []
            for give in actor.gives:
                register = network.register(give.register)
                for consumer, port in readers.get(give.register, ()):
                    outs.append((give, register.high - register.initial))
                    self.producer[consumer][port] = at, len(to)
                    to.append((consumer, port))
            registers = [network.register(take.register) for take in actor.takes]
            # What lies in a register that nobody fills is all that there will be.
            ended = tuple(register.name not in network.producers for register in registers)
            self.actors.append(Wired(actor, tuple(outs), tuple(register.initial for register in registers), ended))
            self.consumer.append(to)

    def states(self) -> list[ActorState]:
        """The states of all actors at the start."""
        return [wired.first for wired in self.actors]


def step(wired: Wired, state: ActorState, event: Event) -> tuple[ActorState, tuple[Message, ...]]:
    """The next state and the messages to send; no clock, no socket, no stream. What the table lacks changes nothing."""
    kind, port, slots = event
    phase, fired, have, ended, credits = state
    if (phase, kind) not in NEXT:
        raise ScheduleError(f"actor {wired.actor.name} is {phase} and was told {kind!r}")
    if kind == "filled":
        have = _more(have, port, slots)
    elif kind == "freed":
        credits = _more(credits, port, slots)
    elif kind == "end":
        ended = (*ended[:port], True, *ended[port + 1 :])
    elif kind == "fire":
        return _fired(wired, state), _NOTHING
    else:
        return _done(wired, state)
    if phase == "waiting":
        phase = _phase(wired, fired, have, ended, credits)
        if phase == "ended":
            return ActorState(phase, fired, have, ended, credits), _ends(wired)
    return _new(ActorState, (phase, fired, have, ended, credits)), _NOTHING


def _more(counts: tuple[int, ...], at: int, slots: int) -> tuple[int, ...]:
    changed = list(counts)
    changed[at] += slots
    return tuple(changed)


def _fired(wired: Wired, state: ActorState) -> ActorState:
    _, fired, have, ended, credits = state
    case = wired.sequence[fired % wired.round]
    taken, reserved = list(have), list(credits)
    for at, slots, every, _, _ in wired.takes[case]:
        if every == 1 or wired.turn(False, at, fired) % every == 0:
            taken[at] -= slots
    for at, slots, every, _, _ in wired.outs[case]:
        if every == 1 or wired.turn(True, at, fired) % every == 0:
            reserved[at] -= slots
    return _new(ActorState, ("running", fired, tuple(taken), ended, tuple(reserved)))


def _done(wired: Wired, state: ActorState) -> tuple[ActorState, tuple[Message, ...]]:
    _, fired, have, ended, credits = state
    messages = wired.told[wired.sequence[fired % wired.round]]
    if wired.grouped:
        messages = tuple([message for message in messages if _closes(wired, fired, message)])
    fired += 1
    phase = _phase(wired, fired, have, ended, credits)
    if phase == "ended":
        messages += _ends(wired)
    return _new(ActorState, (phase, fired, have, ended, credits)), messages


def _closes(wired: Wired, fired: int, message: Message) -> bool:
    """Whether this firing is the last of the group that the message is about."""
    out = message.kind == "filled"
    actor, at = wired.actor, message.port
    every = actor.gives[wired.give[at]].every if out else actor.takes[at].every
    return (wired.turn(out, at, fired) + 1) % every == 0


def _phase(wired: Wired, fired: int, have: tuple[int, ...], ended: tuple[bool, ...], credits: tuple[int, ...]) -> Phase:
    """The phase of an actor that runs nothing: ended if it can never fire again, ready if it can now."""
    if fired >= wired.limit:
        return "ended"
    case = wired.sequence[fired % wired.round]
    phase: Phase = "ready"
    for port in wired.takes[case]:
        at, slots, every, low, _ = port
        if have[at] < slots + low and (every == 1 or wired.turn(False, at, fired) % every == 0):
            if have[at] >= wired.needed(port, fired):
                continue
            if not ended[at]:
                phase = "waiting"
            elif have[at] < slots:
                return "ended"
    for at, slots, every, _, _ in wired.outs[case]:
        if credits[at] < slots and (every == 1 or wired.turn(True, at, fired) % every == 0):
            return "waiting"
    return phase


def _ends(wired: Wired) -> tuple[Message, ...]:
    return tuple([Message("end", at) for at in range(len(wired.give))])


_NOTHING: tuple[Message, ...] = ()
_new = tuple.__new__  # a state of five values; State(...) takes twice as long, and a step makes one
