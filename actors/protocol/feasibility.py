"""Proof that a network ends, and who waits for whom where one does not.

One simulated run is enough. Whoever else goes before, an actor that is ready stays ready until it fires, for every
message only adds slots; so all orders of events, whatever things take, lead to the same end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ...placement.errors import ScheduleError
from .network import Give, Network, Take
from .protocol import ActorState, Wired
from .reorder import sooner
from .simulate import Simulation, simulate
from .state import Desk

__all__ = ["Mark", "Travel", "Wait", "Waits", "cycle", "marked", "proved", "remedies", "waits"]

MOST = 24  # lines of waits that a message shows
FREE = 1 << 40  # slots that no run fills
FEW = 50_000  # firings of all runs of a search that takes a moment only

Travel: TypeAlias = Literal["send", "receive"]  # what an actor does that goes to other ranks


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that holds up an actor: it has `have` of `need` slots, which `by` has still to fill or to free.

    At `low` there are slots to take and too few behind them. An actor at work waits for nobody, one that is ready for
    its queue; one that sends or receives waits for other ranks to take or to send.
    """

    actor: str
    fired: int
    what: Literal["filled", "freed", "low", "queue", "work", "take", "send", "ask"]
    register: str = ""
    have: int = 0
    need: int = 0
    by: str = ""
    port: int = 0  # which of the takes of the actor
    over: bool = False  # `by` has ended

    def __str__(self) -> str:
        who = f"{self.actor} (fired {self.fired})"
        if self.what == "work":
            return f"{who} is at work"
        if self.what == "queue":
            return f"{who} is ready" + (f" and waits for its queue, where {self.by} is at work" if self.by else "")
        if self.what in ("take", "send"):
            return f"{who} waits for rank{'s' * (',' in self.by)} {self.by} to {self.what} it"
        if self.what == "ask":
            return f"{who} has not been asked for"
        state = "free" if self.what == "freed" else "filled"
        low = ", its low mark," if self.what == "low" else ""
        over = ", which has ended" if self.over else ""
        return f"{who} waits for {self.register}: {self.have} of {self.need}{low} {state}, by {self.by}{over}"


class Waits(tuple[Wait, ...]):
    """All waits of a network; as text, first the circle or the chain that explains the others."""

    __slots__ = ()

    def __str__(self) -> str:
        first = cycle(self)
        lines = [*_told(first), *(str(wait) for wait in self if wait not in first)]
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        return "\n".join(f"  {line}" for line in lines[:MOST] + more)


def waits(desk: Desk, travel: Sequence[Travel | None] = ()) -> Waits:
    """Each actor that has not ended, with what it waits for. `travel` has for each whether it sends or receives.

    What was sent is posted before anybody waits for it, and may have been taken long ago: only those are named whose
    slots are missing.

    >>> from .network import Actor, Give, Register, Take
    >>> f, b = Actor("f", "q", gives=(Give("x"),), firings=3), Actor("b", "q", (Take("x", low=1),))
    >>> print(waits(simulate(Network((f, b), (Register("x"),))).desk))
      f (fired 1) waits for x: 0 of 1 free, by b
      b (fired 0) waits for x: 1 of 2, its low mark, filled, by f
      and so in a circle
    """
    found = list(_waits(desk))
    known = {actor.name: way for actor, way in zip(desk.wiring.network.actors, travel, strict=False)}
    asked = {wait.by for wait in found}
    listed: list[Wait] = []
    for wait in found:
        way = known.get(wait.actor)
        if way is None or wait.what not in ("work", "queue"):
            listed.append(wait)
        elif wait.actor in asked or (way == "receive" and wait.what == "work"):
            peers = wait.actor.partition(":")[0].partition(" ")[2]
            what: Literal["take", "send", "ask"] = "take" if way == "send" else "send"
            if what == "send" and wait.what == "queue":
                what = "ask"
            listed.append(replace(wait, what=what, by=peers if what != "ask" else ""))
    return Waits(listed)


def _waits(desk: Desk) -> Iterator[Wait]:
    actors = desk.wiring.network.actors
    working = {actors[at].queue: actors[at].name for at, state in enumerate(desk.states) if state.phase == "running"}
    for at, state in enumerate(desk.states):
        name = actors[at].name
        match state.phase:
            case "running":
                yield Wait(name, state.fired, "work")
            case "ready":
                yield Wait(name, state.fired, "queue", by=working.get(actors[at].queue, ""))
            case "waiting":
                yield from _lacks(desk, at, state)


def _lacks(desk: Desk, at: int, state: ActorState) -> Iterator[Wait]:
    wiring, states = desk.wiring, desk.states
    wired, actors = wiring.actors[at], wiring.network.actors
    name, fired = wired.actor.name, state.fired

    def begins(out: bool, port: int, every: int) -> bool:
        return every == 1 or wired.turn(out, port, fired) % every == 0

    case = wired.case(fired)
    for taken in wired.takes[case]:
        port, slots, every, _, _ = taken
        have, need = state.have[port], wired.needed(taken, fired)
        if begins(False, port, every) and not state.ended[port] and have < need:
            by, _ = wiring.producer[at][port]
            skips = wired.actor.takes[port].skips  # which no mark changes
            what: Literal["low", "filled"] = "filled" if have < slots or skips else "low"
            if what == "filled" and not skips:
                need = slots
            other = actors[by].name, port, states[by].phase == "ended"
            yield Wait(name, fired, what, wired.actor.takes[port].register, have, need, *other)
    for port, slots, every, _, _ in wired.outs[case]:
        if begins(True, port, every) and state.credits[port] < slots:
            by, take = wiring.consumer[at][port]
            register = wired.actor.gives[wired.give[port]].register
            other = actors[by].name, take, states[by].phase == "ended"
            yield Wait(name, fired, "freed", register, state.credits[port], slots, *other)


def cycle(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """A shortest circle of waits; where there is none, the chain from the first one to its end.

    It is a circle if the last waits for the first.
    """
    listed: dict[str, list[Wait]] = {}
    for wait in waits:
        listed.setdefault(wait.actor, []).append(wait)
    best: tuple[Wait, ...] = ()
    for start in listed:
        found = _way_back(start, listed, len(best) - 1 if best else len(listed))
        best = found or best
        if len(best) == 1 or (len(best) == 2 and found):
            break
    if best or not waits:
        return best
    chain = [waits[0]]
    while chain[-1].by in listed:
        chain.append(listed[chain[-1].by][0])
    return tuple(chain)


def _way_back(start: str, listed: dict[str, list[Wait]], most: int) -> tuple[Wait, ...]:
    """The shortest circle through an actor, of at most so many waits."""
    ways: dict[str, tuple[Wait, ...]] = {start: ()}
    edge = [start]
    for _ in range(most):
        reached = []
        for name in edge:
            for wait in listed.get(name, ()):
                if wait.by == start:
                    return *ways[name], wait
                if wait.by in listed and wait.by not in ways:
                    ways[wait.by] = (*ways[name], wait)
                    reached.append(wait.by)
        edge = reached
    return ()


def _told(chain: Sequence[Wait]) -> list[str]:
    circle = bool(chain) and chain[-1].by == chain[0].actor
    return [*map(str, chain), *["and so in a circle"] * circle]


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark and its new value: `high` of a register, or `low` of one take of an actor."""

    register: str
    kind: Literal["high", "low"]
    value: int
    was: int
    actor: str = ""
    port: int = 0

    @property
    def change(self) -> int:
        return abs(self.value - self.was)

    def __str__(self) -> str:
        where = f" in {self.actor}" if self.actor else ""
        return f"{self.kind}={self.value} for {self.register}{where} (now {self.was})"


def marked(network: Network, marks: Sequence[Mark]) -> Network:
    """The network with other marks."""
    highs = {mark.register: mark.value for mark in marks if mark.kind == "high"}
    lows = {(mark.actor, mark.port): mark.value for mark in marks if mark.kind == "low"}
    registers = tuple(replace(r, high=highs.get(r.name, r.high)) for r in network.registers)
    actors = []
    for actor in network.actors:
        takes = tuple(replace(t, low=lows.get((actor.name, n), t.low)) for n, t in enumerate(actor.takes))
        actors.append(replace(actor, takes=takes) if takes != actor.takes else actor)
    return replace(network, actors=tuple(actors), registers=registers)


def proved(network: Network) -> Simulation:
    """The simulated run of a network that ends. One that cannot is refused, with the marks that would let it.

    All `firings` must be reached, and no group of `every` be cut short: what it gathered would be lost.
    """
    run = simulate(network)
    if not run.finished:
        raise _refused(run)
    for wired, state in zip(run.desk.wiring.actors, run.desk.states, strict=True):
        _complete(network, wired, state.fired)
    return run


def _refused(run: Simulation) -> ScheduleError:
    found = waits(run.desk)
    chain = cycle(found)
    lines = [f"{run.network.name} is infeasible: it stops after {len(run.firings)} firings", *_told(chain)]
    if others := len({wait.actor for wait in found} - {wait.actor for wait in chain}):
        lines.append(f"{others} others wait as well")
    helps = [" and ".join(map(str, marks)) for marks in remedies(run)]
    fix = "; or ".join(dict.fromkeys(helps[:3] if all(" and " not in each for each in helps) else helps[:1]))
    if fix:
        lines.append(f"try {fix}")
    elif any(run.network.actor(wait.actor).sequence for wait in chain):
        changes = "; then ".join(map(str, sooner(run.network)))
        lines.append(f"do {changes}" if changes else "no mark helps: what these orders wait for must come before it")
    else:
        lines.append("no mark helps: fill some of these slots at first, or take a wait away")
    return ScheduleError("\n  ".join(lines))


def _complete(network: Network, wired: Wired, fired: int) -> None:
    actor = wired.actor
    if fired < actor.firings:
        what = f"{actor.name} is to fire {actor.firings} times, and what it takes ends after {fired}"
        raise ScheduleError(f"{network.name} ends too early: {what}\n  make these agree")
    ports: list[tuple[str, int, Take | Give]] = []
    ports += [("fills", wired.turn(True, n, fired), actor.gives[give]) for n, give in enumerate(wired.give)]
    ports += [("takes", wired.turn(False, n, fired), take) for n, take in enumerate(actor.takes)]
    for verb, turns, port in ports:
        if over := turns % port.every:
            what = (
                f"{actor.name} {verb} {port.register} once in {port.every} firings, and the last group has only {over}"
            )
            fix = f"let it fire {turns - over} or {turns - over + port.every} times where it does {turns} times"
            raise ScheduleError(f"{network.name} ends in the middle of a group: {what}\n  {fix}")


def remedies(run: Simulation) -> list[tuple[Mark, ...]]:
    """Marks for which a stuck network ends, each choice enough by itself, the smallest change first; none may help.

    A mark that is enough alone lies in the first circle. Where none is, there is one choice of several together.
    """
    network, chain = run.network, cycle(waits(run.desk))
    widest = [replace(mark, value=FREE if mark.kind == "high" else 0) for _, mark in _holding(network, chain)]
    alone = [[mark] for mark in widest if simulate(marked(network, [mark]), record=False).finished]
    if not alone:
        together = _together(run)
        return [together] if together else []
    found = dict.fromkeys(_smallest(network, option) for option in alone)
    return sorted(found, key=lambda marks: sum(mark.change for mark in marks))


def _holding(network: Network, chain: Sequence[Wait]) -> Iterator[tuple[Wait, Mark]]:
    """The marks, as they are, that hold up someone in a circle of waits."""
    for wait in chain:
        if wait.what == "freed":
            high = network.register(wait.register).high
            yield wait, Mark(wait.register, "high", high, high)
        elif wait.what == "low":
            low = network.actor(wait.actor).takes[wait.port].low
            yield wait, Mark(wait.register, "low", low, low, wait.actor, wait.port)


def _together(run: Simulation) -> tuple[Mark, ...]:
    """Marks that are enough together: in every circle one, changed by what is missing, until nothing waits."""
    network, found = run.network, dict[Mark, Mark]()  # by the mark as it was
    while not run.finished:
        steps: list[tuple[int, int, Mark, Mark]] = []
        for wait, was in _holding(network, cycle(waits(run.desk))):
            now = found.get(was, was)
            more = max(wait.need - wait.have, now.change)  # twice as far each time
            value = now.value + more if was.kind == "high" else max(0, now.value - more)
            steps.append((more, len(steps), was, replace(now, value=value)))
        if not steps:
            return ()
        _, _, was, now = min(steps)
        found[was] = now
        run = simulate(marked(network, list(found.values())), record=False)
    marks = list(found.values())
    few = len(marks) * sum(state.fired for state in run.desk.states) < FEW
    return _smallest(network, marks) if few else tuple(marks)


def _smallest(network: Network, marks: list[Mark]) -> tuple[Mark, ...]:
    """The same marks, one after the other moved back towards what they were, as far as the network still ends."""

    def tried(at: int, value: int) -> Simulation:
        marks[at] = replace(marks[at], value=value)
        return simulate(marked(network, marks), record=False)

    for at, mark in enumerate(marks):
        if len(marks) > 1 and tried(at, mark.was).finished:
            continue  # the others are enough
        good, bad = mark.value, mark.was  # it ends with the first and not with the second
        if good == FREE:
            good = max(tried(at, good).peak[mark.register], bad + 1)
        while abs(good - bad) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if tried(at, middle).finished else (good, middle)
        marks[at] = replace(mark, value=good)
    return tuple([mark for mark in marks if mark.change])
