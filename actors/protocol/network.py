"""Networks: actors, the registers between them and the queues that run them, as plain values.

    register   slots that one actor fills and others read; `high` slots exist, `initial` of them are filled at the start
    take       how an actor reads a register; `low` is a delay line: slot k may be taken when slot k + low is filled
    give       how an actor fills one
    actor      fires when every slot it takes is filled and every slot it gives is free
    queue      what hardware runs in order: a compute stream, a link, a copy engine; it serves the first ready actor

Rates: what is taken every n firings is held for all n and freed after the last (repeat); what is given every n firings
is reserved for the first and filled by the last (accumulate); several slots at once join or cut.
An actor with a `sequence` does several things, its cases, in that order: chunks of a device, or a whole order table.
Every take reads all slots of its register, those of one actor too: what two cases read lies there until both have.
A case such as "F0&B1" is two things at once, its parts: it begins when both can, ends for both, and each works on slots
of its own number.
An actor without `firings` ends when what its next firing takes has ended, whatever its other cases could still take.

A network is opened by making another one of it, with more actors, or with a register led through some of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from zlib import crc32

from ...placement.errors import ScheduleError, did_you_mean

__all__ = ["Actor", "Give", "Network", "Register", "Take", "skips"]


@dataclass(frozen=True, slots=True)
class Register:
    """Slots between one producer and its consumers. A token has no bytes; `delay` is how long a slot travels."""

    name: str
    high: int = 1
    initial: int = 0
    bytes: int = 0
    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class Take:
    """`slots` of a register, taken at the first of `every` firings of `case` and freed after the last."""

    register: str
    slots: int = 1
    every: int = 1
    low: int = 0
    lifo: bool = False  # the newest filled slot first
    case: str = ""  # of the actor; none: every one
    skips: tuple[int, ...] = ()  # of each firing of its case: how many slots, filled sooner, it leaves lying there


@dataclass(frozen=True, slots=True)
class Give:
    """`slots` of a register, reserved at the first of `every` firings of `case` and filled by the last."""

    register: str
    slots: int = 1
    every: int = 1
    case: str = ""


@dataclass(frozen=True)
class Actor:
    """Something that is done again and again on one queue.

    It fires `firings` times, or, where that is 0, until what it takes has ended. Of several ready actors the queue runs
    that of the smallest `(firing // unit, kind, firing // group, place, firing)`.
    """

    name: str
    queue: str
    takes: tuple[Take, ...] = ()
    gives: tuple[Give, ...] = ()
    firings: int = 0
    time: float = 0.0
    kind: int = 0
    place: int = 0
    unit: int = 0  # 0: all firings are of one
    group: int = 0
    sequence: tuple[str, ...] = ()  # of cases
    times: tuple[tuple[str, float], ...] = ()  # of cases, where they differ from `time`

    @cached_property
    def cases(self) -> tuple[str, ...]:
        """The cases of an actor in the order in which each comes first; a plain actor has one, without a name."""
        return tuple(dict.fromkeys(self.sequence)) or ("",)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The cases of an actor with those that are two at once taken apart."""
        return tuple(dict.fromkeys(part for case in self.cases for part in case.split("&")))

    def key(self, firing: int) -> tuple[int, ...]:
        """The key of a queue: rank and name."""
        unit, group = self.unit, self.group
        return firing // unit if unit else 0, self.kind, firing // group if group else 0, self.place, firing

    def active(self, port: Take | Give, case: str) -> bool:
        """Whether a port is of a case. One that is two at once has the ports of both."""
        return not port.case or port.case == case or port.case in case.split("&")


@dataclass(frozen=True)
class Network:
    """Actors and registers that fit together; anything that does not is refused here."""

    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    name: str = "network"
    producers: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, names in ("actors", [a.name for a in self.actors]), ("registers", [r.name for r in self.registers]):
            for name, number in Counter(names).items():
                if number > 1:
                    raise _bad(self, f"{number} {what} are called {name}", "give each its own name")
        known = self._registers
        readers: dict[str, list[Take]] = {}
        producers: dict[str, str] = {}
        for actor in self.actors:
            _check_actor(self, actor)
            ports: tuple[Take | Give, ...] = (*actor.takes, *actor.gives)
            for port in ports:
                if port.register not in known:
                    raise _bad(self, f"{actor.name} uses {port.register}, which is no register", "add the register")
                _check_port(self, actor, port)
            for give in actor.gives:
                first = producers.setdefault(give.register, actor.name)
                if first != actor.name:
                    raise _bad(
                        self, f"both {first} and {actor.name} fill {give.register}", "give each its own register"
                    )
            for take in actor.takes:
                readers.setdefault(take.register, []).append(take)
        for register in self.registers:
            _check_register(self, register, register.name in producers, readers.get(register.name, []))
        object.__setattr__(self, "producers", producers)

    @cached_property
    def queues(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(actor.queue for actor in self.actors))

    def actor(self, name: str) -> Actor:
        return self._actors[name]

    def register(self, name: str) -> Register:
        return self._registers[name]

    def adding(self, actors: Iterable[Actor] = (), registers: Iterable[Register] = ()) -> "Network":
        """The network with more actors and registers."""
        return replace(self, actors=(*self.actors, *actors), registers=(*self.registers, *registers))

    def replacing(self, *actors: Actor) -> "Network":
        """The network in which the actors of these names are these."""
        changed = {actor.name: actor for actor in actors}
        for name in changed:
            self._named(name)
        return replace(self, actors=tuple(changed.get(actor.name, actor) for actor in self.actors))

    def reading(self, name: str, *takes: Take) -> "Network":
        """The network in which an actor waits for more registers."""
        actor = self._named(name)
        return self.replacing(replace(actor, takes=(*actor.takes, *takes)))

    def through(self, name: str, *stops: Actor, slots: Sequence[int] = ()) -> "Network":
        """The network in which what lies in a register goes through more actors before it is read.

        `stops` are these without ports, in order. `slots` has the slots of every leg, first of the register itself,
        which the first stop reads now; else all have as many as it had. Leg `act.0 by evict` is what the stop `evict`
        fills. How far the two ends may be apart is counted as before, in the token `act.0 in order`.
        """
        if name not in self._registers or name not in self.producers:
            raise _bad(self, f"there is no register {name} that an actor fills", did_you_mean(name, self.producers))
        register, maker = self.register(name), self.actor(self.producers[name])
        slots = slots or [register.high] * (len(stops) + 1)
        if not stops or len(slots) != len(stops) + 1:
            what = f"{name} through {len(stops)} actors has {len(stops) + 1} legs, and slots of {len(slots)}"
            raise _bad(self, what, "give an actor at least, and slots for every leg, or none")
        legs = [name, *(f"{name} by {stop.name}" for stop in stops)]
        token = f"{name} in order"
        made = [replace(register, name=leg, high=high) for leg, high in zip(legs, slots, strict=True)]
        made = [made[0], *(replace(leg, initial=0) for leg in made[1:])]
        added = [
            replace(stop, takes=(*stop.takes, Take(a)), gives=(*stop.gives, Give(b)))
            for stop, a, b in zip(stops, legs, legs[1:], strict=False)
        ]
        actors = []
        for actor in self.actors:
            if any(take.register == name for take in actor.takes):
                led = [replace(t, register=legs[-1], low=0) if t.register == name else t for t in actor.takes]
                more = [replace(t, register=token, lifo=False, skips=()) for t in actor.takes if t.register == name]
                actor = replace(actor, takes=(*led, *more))
            if actor.name == maker.name:
                counted = [replace(g, register=token) for g in actor.gives if g.register == name]
                actor = replace(actor, gives=(*actor.gives, *counted))
            actors.append(actor)
        registers = [r for old in self.registers for r in (made if old.name == name else [old])]
        registers.append(replace(register, name=token, bytes=0, delay=0.0))
        return replace(self, actors=(*actors, *added), registers=tuple(registers))

    def _named(self, name: str) -> Actor:
        if name not in self._actors:
            raise _bad(self, f"there is no actor {name}", did_you_mean(name, self._actors))
        return self._actors[name]

    def __str__(self) -> str:
        return self.text

    @cached_property
    def _actors(self) -> dict[str, Actor]:
        return {actor.name: actor for actor in self.actors}

    @cached_property
    def _registers(self) -> dict[str, Register]:
        return {register.name: register for register in self.registers}

    @property
    def text(self) -> str:
        """Every actor and register, a line each; ranks that have the same network have the same text."""
        return "\n".join(_lines(self))

    @property
    def fingerprint(self) -> int:
        return crc32(self.text.encode())


def skips(filled: Iterable[int], taken: Iterable[int]) -> tuple[int, ...]:
    """The skips of a take that finds slots filled in one order, and takes them in another; nothing where that is one.

    >>> skips([0, 1, 2], [1, 2, 0])
    (1, 1, 0)
    """
    left, wanted, found = list(filled), list(taken), list[int]()
    if left == wanted:
        return ()
    for number in wanted:
        found.append(left.index(number))
        del left[found[-1]]
    return tuple(found)


def _lines(network: Network) -> Iterator[str]:
    yield network.name
    for r in network.registers:
        yield f"register {r.name}: {r.high} slots, {r.initial} filled, {r.bytes} bytes"
    for a in network.actors:
        takes = ", ".join(_port(p, a) + _marks(p) for p in a.takes)
        gives = ", ".join(_port(p, a) for p in a.gives)
        order = f" firings {a.firings} kind {a.kind} place {a.place} unit {a.unit} group {a.group}"
        yield f"actor {a.name} on {a.queue}{order} {' '.join(a.sequence)}: {takes} -> {gives}"


def _marks(take: Take) -> str:
    skips = " skips " + " ".join(map(str, take.skips)) if take.skips else ""
    return (f" low {take.low}" if take.low else "") + " lifo" * take.lifo + skips


def _port(port: Take | Give, actor: Actor) -> str:
    case = f"[{port.case}]" if port.case else ""
    return f"{case}{port.register} {port.slots}/{port.every}"


def _check_actor(network: Network, actor: Actor) -> None:
    if actor.firings < 0:
        raise _bad(network, f"{actor.name} is to fire {actor.firings} times", "firings is 0 or more")
    if not actor.firings and not actor.takes:
        raise _bad(network, f"{actor.name} takes nothing and has no firings", "give it firings, or something to take")
    if not 0 <= actor.time < inf or any(not 0 <= time < inf or case not in actor.cases for case, time in actor.times):
        fix = "times are of cases, 0 or more, and have an end"
        raise _bad(network, f"{actor.name} takes {actor.time} and {dict(actor.times)}", fix)
    for case in actor.cases:
        twice = next((part for part, number in Counter(case.split("&")).items() if number > 1), None)
        if twice is not None:
            fix = "things that are done at once are different ones, as in 'F0&B1'"
            raise _bad(network, f"{actor.name} does {twice} twice at once, in {case}", fix)
    filled = Counter(give.register for give in actor.gives)
    for register, number in filled.items():
        if number > 1:
            raise _bad(network, f"{actor.name} fills {register} in {number} ways", "let one give serve every case")


def _check_port(network: Network, actor: Actor, port: Take | Give) -> None:
    unknown = not any(actor.active(port, case) for case in actor.cases)
    wrong = port.slots < 1 or port.every < 1 or unknown
    if isinstance(port, Take) and port.skips:
        alone = port.slots == port.every == 1 and not port.low and not port.lifo
        wrong = wrong or not alone or min(port.skips) < 0
    if wrong or (isinstance(port, Take) and port.low < 0):
        fix = f"slots and every are 1 or more, low is 0 or more, case is one of {actor.cases}, skips have none of these"
        raise _bad(network, f"{actor.name} uses {port.register} in a way that cannot be: {port}", fix)


def _check_register(network: Network, register: Register, filled: bool, readers: list[Take]) -> None:
    name, high, initial = register.name, register.high, register.initial
    if high < 1 or not 0 <= initial <= high or not 0 <= register.delay < inf:
        what = f"{name} has {initial} of {high} slots filled at first and a delay of {register.delay}"
        raise _bad(network, what, "high is 1 or more, initial no more than high, delay 0 or more")
    if not filled and initial < max((take.slots for take in readers), default=1):
        what = f"nobody fills {name}, and of its slots {initial} are filled at first"
        raise _bad(network, what, "let an actor give it, or fill enough of its slots at first")
    backward = [take for take in readers if take.lifo]
    if backward and (len(readers) > 1 or backward[0].slots > 1):
        what = f"{name} is read from the back by one of {len(readers)} readers, {backward[0].slots} slots at once"
        raise _bad(network, what, "a register that is read from the back has one reader, for one slot at once")


def _bad(network: Network, what: str, fix: str) -> ScheduleError:
    return ScheduleError(f"{network.name}: {what}\n  {fix}")
