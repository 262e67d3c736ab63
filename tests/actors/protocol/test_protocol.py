"""The protocol: the table is all there is, a step is pure, and no order of events leads anywhere but to the end."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.protocol import NEXT, ActorState, Event, Message, MessageKind, Phase, Wired, Wiring, step
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.protocol.state import Desk, Firing, Slot
from sbpflow.actors.schedules.pipeline import network_of
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.placement.errors import ScheduleError
from tests.actors.networks import chain, feasible, fits, marks

PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[MessageKind, ...] = get_args(MessageKind)

# --- the table ---


def middle() -> Wired:
    """An actor with a take and a give, on its own between two others."""
    actors = (
        Actor("a", "q", gives=(Give("x"),), firings=9),
        Actor("b", "q", (Take("x"),), (Give("y"),)),
        Actor("c", "q", (Take("y"),)),
    )
    return Wiring(Network(actors, (Register("x", 4), Register("y", 4)))).actors[1]


@pytest.mark.parametrize(("phase", "kind"), [pair for pair in product(PHASES, KINDS) if pair not in NEXT])
def test_what_the_table_lacks_is_refused(phase: Phase, kind: MessageKind) -> None:
    state = ActorState(phase, 3, (1,), (False,), (2,))
    with pytest.raises(ScheduleError, match=f"actor b is {phase} and was told '{kind}'"):
        step(middle(), state, Event(kind, 0, 1))
    assert state == ActorState(phase, 3, (1,), (False,), (2,))


def states(phase: Phase) -> list[ActorState]:
    """States of one take and one give; who waits and has nothing, has not been told of the end."""
    every = [
        ActorState(phase, 3, (have,), (end,), (free,)) for have, end, free in product((0, 1, 2), (False, True), (0, 1))
    ]
    return [state for state in every if phase != "waiting" or state.have[0] or not state.ended[0]]


@pytest.mark.parametrize(("phase", "kind"), NEXT)
def test_a_step_leads_to_where_the_table_says_and_is_pure(phase: Phase, kind: MessageKind) -> None:
    for state in states(phase):
        first, second = (step(middle(), state, Event(kind, 0, 1)) for _ in range(2))
        assert first == second
        assert first[0].phase in NEXT[phase, kind]
        assert isinstance(first[0], ActorState)


@pytest.mark.parametrize(("phase", "kind"), NEXT)
def test_every_place_that_the_table_names_is_reached(phase: Phase, kind: MessageKind) -> None:
    assert {step(middle(), state, Event(kind, 0, 1))[0].phase for state in states(phase)} == set(NEXT[phase, kind])


# --- one actor ---


def told(wired: Wired, *events: Event) -> tuple[ActorState, list[Message]]:
    state, messages = wired.first, list[Message]()
    for event in events:
        state, more = step(wired, state, event)
        messages += more
    return state, messages


def alone(actor: Actor, *registers: Register) -> Wired:
    """An actor beside others that take what it gives and give what it takes."""
    source = Actor("source", "q", gives=tuple(Give(take.register) for take in actor.takes), firings=99)
    sink = Actor("sink", "q", tuple(Take(give.register) for give in actor.gives) or (Take("_"),))
    others = (source, sink) if actor.gives else (source,)
    return Wiring(Network((actor, *others), registers)).actors[0]


FILLED, FREED, END, FIRE, DONE = (Event(kind, 0, 1) for kind in KINDS)


def test_a_firing_takes_at_its_beginning_and_tells_at_its_end() -> None:
    wired = alone(Actor("b", "q", (Take("x"),), (Give("y"),)), Register("x", 2), Register("y", 2))
    state, messages = told(wired, FILLED, FIRE)
    assert (state.phase, state.have, state.credits, messages) == ("running", (0,), (1,), [])
    after, sent = step(wired, state, DONE)
    assert after.phase == "waiting"
    assert sent == (Message("filled", 0, 1), Message("freed", 0, 1))


def test_a_low_mark_waits_for_later_slots_until_there_are_none() -> None:
    wired = alone(Actor("b", "q", (Take("x", low=2),)), Register("x", 4))
    assert told(wired, FILLED, FILLED)[0].phase == "waiting"
    assert told(wired, FILLED, FILLED, FILLED)[0].phase == "ready"
    assert told(wired, FILLED, END)[0].phase == "ready"
    assert told(wired, END, FILLED)[0].phase == "ended"


def test_what_is_taken_every_three_firings_is_freed_after_the_third() -> None:
    wired = alone(Actor("b", "q", (Take("x", every=3),)), Register("x", 4))
    state, messages = told(wired, FILLED, FIRE, DONE, FIRE, DONE)
    assert (state.phase, state.have, messages) == ("ready", (0,), [])
    state, messages = told(wired, FILLED, FIRE, DONE, FIRE, DONE, FIRE, DONE)
    assert (state.phase, messages) == ("waiting", [Message("freed", 0, 1)])


def test_what_is_given_every_two_firings_is_reserved_by_the_first_and_filled_by_the_second() -> None:
    wired = alone(Actor("b", "q", (Take("x"),), (Give("y", slots=3, every=2),)), Register("x", 9), Register("y", 3))
    begun, messages = told(wired, FILLED, FIRE, DONE)
    assert (begun.credits, messages) == ((0,), [Message("freed", 0, 1)])
    state, messages = told(wired, FILLED, FILLED, FILLED, FIRE, DONE, FIRE, DONE)
    assert messages[1] == Message("filled", 0, 3)
    assert state.phase == "waiting"  # the third is filled, and of y's slots none is free


def test_groups_of_a_case_count_the_firings_of_that_case() -> None:
    takes = Take("x", every=2, case="a"), Take("y", case="b")
    wired = alone(Actor("b", "q", takes, sequence=("a", "b", "a")), Register("x", 4), Register("y", 4))
    state, messages = told(wired, FILLED, Event("filled", 1, 1), FIRE, DONE, FIRE, DONE, FIRE, DONE)
    assert [message.port for message in messages] == [1, 0]
    assert state.phase == "waiting"


def test_an_actor_of_several_cases_ends_when_the_next_of_them_has_nothing_left() -> None:
    takes = Take("x", case="a"), Take("y", case="b")
    wired = alone(Actor("b", "q", takes, sequence=("a", "b")), Register("x", 4), Register("y", 4))
    state, _ = told(wired, FILLED, Event("end", 1), FIRE)
    assert state.phase == "running"
    assert step(wired, state, DONE)[0].phase == "ended"


def test_an_actor_that_has_ended_tells_all_its_readers() -> None:
    wired = alone(Actor("b", "q", (Take("x"),), (Give("y"), Give("z"))), *(Register(name, 2) for name in "xyz"))
    assert told(wired, END) == (
        wired.first._replace(phase="ended", ended=(True,)),
        [Message("end", 0), Message("end", 1)],
    )


def test_a_register_that_nobody_fills_ends_with_its_first_slots() -> None:
    wired = Wiring(Network((Actor("a", "q", (Take("seed", every=2),)),), (Register("seed", initial=1),))).actors[0]
    state, messages = told(wired, FIRE, DONE, FIRE, DONE)
    assert (state.phase, state.fired, messages) == ("ended", 2, [Message("freed", 0, 1)])


# --- every order of events ---


@dataclass
class World:
    """A desk, and messages on their way: in order on each edge, in any order otherwise."""

    desk: Desk
    flying: dict[tuple[str, int, int], tuple[tuple[Event, tuple[Slot, ...]], ...]] = field(default_factory=dict)
    under_way: dict[int, Firing] = field(default_factory=dict)

    def copy(self) -> "World":
        desk = copy.copy(self.desk)
        desk.states, desk.ready = [*desk.states], [set(ready) for ready in desk.ready]
        desk.slots = [[deque(slots) for slots in listed] for listed in desk.slots]
        desk.held, desk.turns = [[*held] for held in desk.held], [[*turns] for turns in desk.turns]
        return World(desk, dict(self.flying), dict(self.under_way))

    def key(self) -> tuple[object, ...]:
        slots = tuple(tuple(map(tuple, listed)) for listed in self.desk.slots)
        return (*self.desk.states, slots, tuple(sorted(self.flying.items())), tuple(sorted(self.under_way.items())))

    def choices(self) -> Iterator[tuple[str, object]]:
        busy = {self.desk.queue[at] for at in self.under_way}
        yield from (("fire", at) for queue, ready in enumerate(self.desk.ready) if queue not in busy for at in ready)
        yield from (("done", at) for at in self.under_way)
        yield from (("tell", way) for way in self.flying)

    def go(self, what: str, which: object) -> None:
        if what == "fire":
            assert isinstance(which, int)
            self.under_way[which] = self.desk.fire(which)
        elif what == "done":
            assert isinstance(which, int)
            self.post(which, self.desk.done(which))
            del self.under_way[which]
        else:
            assert isinstance(which, tuple)
            (event, slots), *rest = self.flying.pop(which)
            if rest:
                self.flying[which] = tuple(rest)
            self.desk.slots[which[1]][which[2]].extend(slots) if slots else None
            self.post(which[1], self.desk.tell(which[1], event))

    def post(self, at: int, messages: tuple[Message, ...]) -> None:
        wiring = self.desk.wiring
        for kind, port, count in messages:
            if kind == "freed":
                to, edge = wiring.producer[at][port]
                if to >= 0:
                    self.send(("freed", to, edge), Event("freed", edge, count))
                continue
            to, edge = wiring.consumer[at][port]
            slots: tuple[Slot, ...] = ()
            if kind == "filled":
                give = wiring.actors[at].actor.gives[wiring.actors[at].give[port]]
                first = wiring.network.register(give.register).initial
                first += self.under_way[at].label // give.every * count
                slots = tuple(Slot(first + n) for n in range(count))
            self.send(("filled", to, edge), Event(kind, edge, count), slots)

    def send(self, way: tuple[str, int, int], event: Event, slots: tuple[Slot, ...] = ()) -> None:
        self.flying[way] = (*self.flying.get(way, ()), (event, slots))

    def check(self) -> None:
        """No slot is lost or made, on any edge."""
        desk, wiring = self.desk, self.desk.wiring
        for at, wired in enumerate(wiring.actors):
            assert min((*desk.states[at].have, *desk.states[at].credits), default=0) >= 0
            for port, (to, take) in enumerate(wiring.consumer[at]):
                register = wiring.network.register(wired.actor.gives[wired.give[port]].register)
                forth, back = self.flying.get(("filled", to, take), ()), self.flying.get(("freed", at, port), ())
                travel = sum(event.slots for event, _ in (*forth, *back) if event.kind != "end")
                lie = desk.states[to].have[take] + desk.states[at].credits[port]
                assert lie + travel + self.open(at, True, port) + self.open(to, False, take) == register.high
                assert desk.states[to].have[take] == len(desk.slots[to][take])

    def open(self, at: int, out: bool, port: int) -> int:
        """Slots that a group under way has taken or reserved."""
        wired, fired = self.desk.wiring.actors[at], self.desk.states[at].fired
        what = wired.actor.gives[wired.give[port]] if out else wired.actor.takes[port]
        active = at in self.under_way and wired.actor.active(what, wired.actor.cases[wired.case(fired)])
        return what.slots if active or wired.turn(out, port, fired) % what.every else 0


def in_order(firing: Firing, wired: Wired) -> None:
    """Slots come in the order of their register, whatever happened on the way."""
    for port, held in enumerate(firing.held):
        take = wired.actor.takes[port]
        if held:
            first = firing.turn // take.every * take.slots
            assert [slot.label for slot in held] == [*range(first, first + take.slots)]


def advance(world: World, what: str, which: object) -> None:
    world.go(what, which)
    wiring = world.desk.wiring
    if what == "fire" and not any(take.lifo for actor in wiring.network.actors for take in actor.takes):
        assert isinstance(which, int)
        in_order(world.under_way[which], wiring.actors[which])


def explore(network: Network, most: int) -> tuple[int, list[ActorState]]:
    """Go through every state that any order of events reaches; all roads lead to one end."""
    world = World(Desk(Wiring(network)))
    seen, todo, last = {world.key()}, [world], dict[tuple[object, ...], World]()
    while todo:
        world = todo.pop()
        world.check()
        choices = list(world.choices())
        if not choices:
            last[world.key()] = world
        for what, which in choices:
            after = world.copy()
            advance(after, what, which)
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
        assert len(seen) <= most
    (world,) = last.values()
    return len(seen), world.desk.states


def counts(states: list[ActorState]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(state.have, state.credits) for state in states]


def plain(name: str, takes: str, gives: str, firings: int = 0, queue: str = "") -> Actor:
    return Actor(name, queue or name, tuple(map(Take, takes.split())), tuple(map(Give, gives.split())), firings)


def low() -> Network:
    s = Schedule("low", act="p-s", low_b="p-s-1")
    return network_of(s, s.shape(2, 2))


def apart() -> Network:
    s = Schedule("apart", split=True, act="2", stash="3", dy="2", low_b="1", low_w="1")
    return network_of(s, s.shape(1, 4))


def turns() -> Network:
    s = Schedule("turns", v=2, act="m", group="p", pool="2*(p-s-1)+(v-1)*p+1")
    return network_of(s, s.shape(1, 2))


def lifo() -> Network:
    s = Schedule("lifo", lifo=True)
    return network_of(s, s.shape(1, 4))


def versions() -> Network:
    """Weights with a slot filled at first, held for two micro-batches, and made anew after two gradients."""
    forward = Actor("F", "device", (Take("w", every=2),), (Give("act"),), firings=4)
    backward = Actor("B", "device", (Take("act"),), (Give("grad", every=2),), kind=1)
    registers = (Register("act", 2), Register("grad"), Register("w", 1, 1))
    return Network((forward, backward, plain("U", "grad", "w")), registers)


def rates() -> Network:
    """Cut, repeated, gathered and joined."""
    load = Actor("load", "host", gives=(Give("x", slots=2),), firings=2)
    work = Actor("work", "device", (Take("x"),), (Give("y", slots=2), Give("sum", every=4)))
    join = Actor("join", "host", (Take("y", slots=4, low=2),), (Give("z"),))
    log = Actor("log", "log", (Take("z", every=1), Take("sum", every=2)))
    return Network((load, work, join, log), (Register("x", 3), Register("y", 6), Register("sum"), Register("z")))


def shared() -> Network:
    """A register with two readers, and one that two cases of an actor read."""
    twice = Actor("b", "b", (Take("x", case="one"), Take("x", case="two")), sequence=("one", "two", "two", "one"))
    return Network((plain("a", "", "x", 4), plain("c", "x", "", queue="b"), twice), (Register("x", 2),))


def ring() -> Network:
    """Two that go in turn, by a token; one has the token at first."""
    actors = plain("a", "ba", "ab x", 3, "q"), plain("b", "ab", "ba y", 3, "q"), plain("c", "x y", "")
    return Network(actors, (Register("ab"), Register("ba", 1, 1), Register("x"), Register("y")))


def idle() -> Network:
    """Cases that take nothing, and one that ends with a case to come."""
    several = Actor("a", "q", (Take("x", case="b"),), (Give("y", case="a"),), sequence=("a", "b"))
    return Network(
        (plain("s", "", "x", 3), several, plain("t", "y", "", queue="q")),
        (Register("x", 2), Register("y", 1)),
    )


SMALL = [low, apart, turns, lifo, versions, rates, shared, ring, idle]


@pytest.mark.parametrize("made", SMALL, ids=lambda made: made.__name__)
def test_no_order_of_events_stops_a_network(made: Callable[[], Network]) -> None:
    network = made()
    states, end = explore(network, most=40_000)
    assert states > 100
    assert {state.phase for state in end} == {"ended"}
    assert counts(end) == counts(Wiring(network).states())
    assert end == simulate(network).desk.states


@pytest.mark.parametrize("seed", range(6))
def test_a_network_that_stops_does_so_in_one_state_whatever_the_order(seed: int) -> None:
    rng = random.Random(seed)
    m = 4
    while fits(tight := marks(rng, 1, m), m) or sum(s.fired for s in simulate(chain(tight, m)).desk.states) < 4:
        pass
    _, end = explore(chain(tight, m), most=40_000)
    assert end == simulate(chain(tight, m)).desk.states
    assert "waiting" in {state.phase for state in end}


def walk(seed: int) -> None:
    """One order of events, at random, through a random network."""
    rng = random.Random(seed)
    world = World(Desk(Wiring(feasible(seed))))
    first = counts(world.desk.states)
    while choices := list(world.choices()):
        advance(world, *rng.choice(choices))
        if rng.random() < 0.05:
            world.check()
    assert world.desk.ended
    assert counts(world.desk.states) == first


@pytest.mark.parametrize("seed", range(40))
def test_a_random_network_ends_in_a_random_order(seed: int) -> None:
    walk(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40, 1000))
def test_every_random_network_ends_in_a_random_order(seed: int) -> None:
    walk(seed)
