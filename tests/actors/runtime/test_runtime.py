"""The runtime does with threads what the simulator does with a clock, lets go what it has read, and ends on errors."""

import gc
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Ran, simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime.runtime import RunRecord, Runtime, Work, order_of, settled
from sbpflow.actors.schedules.pipeline import Costs, network_of
from sbpflow.actors.schedules.published import PUBLISHED, published
from sbpflow.placement.errors import ScheduleError
from tests.actors.ticks import LIMIT, meeting, threads_meet
from tests.counts import calls

OPEN = (
    "gpipe",
    "eager_1f1b",
    "breadth_first",
    "chimera",
    "chimera_free",
    "chimera_full",
    "terapipe",
)  # whose order depends on the time things take
LOW = ("1f1b", "interleaved", "zb_h1", "zb_h2")  # whose low marks fix the order whatever becomes ready first


class Value:
    """Something that can be seen to be gone."""


def words(ran: Sequence[Ran]) -> str:
    return " ".join(map(str, ran))


def idle(network: Network) -> dict[str, Work]:
    return {actor.name: lambda firing: None for actor in network.actors}


def made(name: str, p: int, m: int, cost: float) -> Network:
    schedule = published(name)
    return network_of(schedule, schedule.shape(p, m, n=2 if schedule.slices else 1), Costs(cost, cost, cost))


def chain(*, firings: int = 4, high: int = 2, queues: tuple[str, str] = ("q", "q")) -> Network:
    actors = (Actor("a", queues[0], (), (Give("x"),), firings), Actor("b", queues[1], (Take("x"),)))
    return Network(actors, (Register("x", high),), "chain")


# -- as in the simulator --

RUN = list(PUBLISHED)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", RUN)
def test_every_queue_runs_in_the_order_of_the_simulation(name: str) -> None:
    network = made(name, 4, 8, 1.0)
    run = simulate(network)
    work = meeting(run, threads_meet())
    with Runtime(network, work, order=None if name in LOW else order_of(run), timeout=LIMIT) as runtime:
        outcome = runtime.run(record=True)
    assert {queue: words(outcome.of(queue)) for queue in network.queues} == {
        queue: words(run.of(queue)) for queue in network.queues
    }


@pytest.mark.sampled(6)
@pytest.mark.parametrize("p", [2, 8])
@pytest.mark.parametrize("name", RUN)
def test_what_is_simulated_at_one_time_runs_at_one_time(name: str, p: int) -> None:
    network = made(name, p, 8, 1.0)
    run = simulate(network)
    with Runtime(network, meeting(run, threads_meet()), order=order_of(run), timeout=LIMIT) as runtime:
        assert len(runtime.run(record=True).firings) == len(run.firings)


@pytest.mark.parametrize("name", PUBLISHED)
def test_marks_settle_the_order_of_a_schedule_or_leave_it_open(name: str) -> None:
    assert settled(simulate(made(name, 4, 8, 1.0))) == (name not in OPEN)


def test_without_an_order_what_is_ready_goes_first() -> None:
    network = made("1f1b", 2, 3, 0.0)
    with Runtime(network, idle(network)) as runtime:
        outcome = runtime.run(record=True)
    assert words(outcome.of("device 1")) == "F10 B10 F11 B11 F12 B12"


def random_network(seed: int) -> Network:
    """Layers of actors on a few queues, each reading some of those before it, with rates and marks drawn at random."""
    draw = random.Random(seed)
    actors: list[Actor] = []
    registers: list[Register] = []
    gives: dict[int, list[Give]] = {}
    takes: dict[int, list[Take]] = {}
    many = draw.randint(2, 8)
    for at in range(1, draw.randint(3, 10)):
        for source in draw.sample(range(at), draw.randint(1, min(at, 2))):
            low = draw.choice((0, 0, 0, 1))
            registers.append(Register(f"r{source}.{at}", draw.randint(many, many + 3) if low else draw.randint(1, 3)))
            gives.setdefault(source, []).append(Give(registers[-1].name))
            takes.setdefault(at, []).append(Take(registers[-1].name, low=low))
    for at in range(max(takes) + 1):
        queue = f"q{draw.randint(0, 3)}"
        parts = tuple(takes.get(at, ())), tuple(gives.get(at, ()))
        actors.append(Actor(f"a{at}", queue, *parts, 0 if at in takes else many, kind=draw.randint(0, 2), place=at))
    return Network(tuple(actors), tuple(registers), f"random {seed}")


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.sweep] if n >= 16 else []) for n in range(200)])
def test_random_networks_go_as_far_as_in_the_simulation_under_random_delays(seed: int) -> None:
    network = random_network(seed)
    run = simulate(network)
    draw = random.Random(seed)
    work: dict[str, Work] = {a.name: lambda firing: time.sleep(draw.random() * 1e-3) for a in network.actors}
    with Runtime(network, work, order=order_of(run) if seed % 2 else None, timeout=10) as runtime:
        if run.finished:
            outcome = runtime.run(record=True)
            assert firings(outcome.firings) == firings(run.firings)
        else:
            with pytest.raises(ScheduleError, match="cannot go on"):
                runtime.run()


def firings(ran: Sequence[Ran]) -> list[str]:
    return sorted(f"{each.actor}{each.label}" for each in ran)


# -- values --


def test_values_go_from_actor_to_actor_with_their_labels() -> None:
    seen: list[tuple[int, object]] = []

    def read(firing: Firing) -> None:
        seen.append((firing.label, firing.held[0][0].value))

    with Runtime(chain(queues=("q", "r")), {"a": lambda f: [f.label * 10], "b": read}) as runtime:
        runtime.run()
        runtime.run()
    assert seen == [(n, n * 10) for n in range(4)] * 2


def test_several_slots_at_once_are_several_values() -> None:
    actors = (
        Actor("split", "q", (), (Give("x", slots=3),), 2),
        Actor("sum", "q", (Take("x", slots=2),), (Give("y", every=3),)),
        Actor("end", "q", (Take("y"),)),
    )
    got: list[object] = []
    totals: list[int] = []

    def add(firing: Firing) -> list[int | None]:
        totals.append(sum(slot.value for slot in firing.held[0]))
        return [sum(totals) if len(totals) == 3 else None]

    work: dict[str, Work] = {
        "split": lambda f: [[3 * f.label + n for n in range(3)]],
        "sum": add,
        "end": lambda f: got.append(f.held[0][0].value),
    }
    Runtime(Network(actors, (Register("x", 6), Register("y"))), work).run()
    assert totals == [1, 5, 9]
    assert got == [15]


@pytest.mark.parametrize("queues", [("q", "q"), ("q", "r")], ids=["one_queue", "two_queues"])
@pytest.mark.parametrize("high", [1, 3])
def test_no_more_values_live_than_there_are_slots(queues: tuple[str, str], high: int) -> None:
    living: weakref.WeakSet[Value] = weakref.WeakSet()
    most: list[int] = []

    def make(firing: Firing) -> list[Value]:
        value = Value()
        living.add(value)
        most.append(len(living))
        return [value]

    def read(firing: Firing) -> None:
        time.sleep(1e-4)

    with Runtime(chain(firings=30, high=high, queues=queues), {"a": make, "b": read}) as runtime:
        runtime.run()
        assert not living  # nothing is kept until the next step
    assert max(most) <= high


# -- errors --


class Boom(Exception):
    pass


def boom(firing: Firing) -> None:
    if firing.label == 2:
        raise Boom("no more")


@pytest.mark.parametrize("actor", ["a", "b"], ids=["calling_thread", "other_thread"])
def test_an_error_stops_every_queue_and_says_where(actor: str) -> None:
    network = chain(firings=100, queues=("q", "r"))
    done: list[int] = []
    counted: dict[str, Work] = {"a": lambda firing: done.append(firing.label), "b": lambda firing: None}
    runtime = Runtime(network, counted | {actor: boom})
    for _ in range(2):  # and again, with new threads
        done.clear()
        with pytest.raises(Boom, match="no more") as caught:
            runtime.run()
        assert len(done) <= 5  # the two that were read, one that is at work, and what there are slots for
        assert caught.value.__notes__ == [f"in actor {actor}, micro-batch 2, on queue {'q' if actor == 'a' else 'r'}"]
        assert not ours()


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sbpflow chain")]


def test_threads_end_with_close_and_with_the_runtime() -> None:
    network = chain(queues=("q", "r"))
    with Runtime(network, idle(network)) as runtime:
        runtime.run()
        assert ours() == ["sbpflow chain: r"]
    assert not ours()
    runtime.run()  # opens it again
    assert ours()
    del runtime
    gc.collect()
    assert not ours()


@pytest.mark.parametrize("on", [True, False])
def test_all_queues_have_the_grad_mode_of_the_calling_thread(on: bool) -> None:
    seen: list[bool] = []

    def look(firing: Firing) -> None:
        seen.append(torch.is_grad_enabled())

    with Runtime(chain(queues=("q", "r")), {"a": look, "b": look}) as runtime:
        for _ in range(2):
            with torch.set_grad_enabled(on):
                runtime.run()
    assert seen == [on] * 16


def test_a_network_of_one_queue_needs_no_thread() -> None:
    network = chain()
    runtime = Runtime(network, idle(network))
    runtime.run()
    assert not ours()


def test_a_firing_costs_the_same_few_calls_however_many_there_are() -> None:
    def each(firings: int) -> float:
        network = chain(firings=firings)
        with Runtime(network, idle(network)) as runtime:
            runtime.run()
            return calls(runtime.run) / (2 * firings)

    assert each(400) <= each(40) <= 60


def test_a_network_that_cannot_go_on_is_an_error_at_once() -> None:
    actors = (Actor("a", "q", (Take("y"),), (Give("x"),)), Actor("b", "r", (Take("x"),), (Give("y"),)))
    network = Network(
        (*actors, Actor("c", "r", (), (Give("z"),), 1), Actor("d", "q", (Take("z"), Take("x", low=9)))),
        (Register("x"), Register("y", initial=1), Register("z")),
        "a circle",
    )
    with (
        pytest.raises(ScheduleError, match=r"a circle cannot go on\n(.|\n)*waits for"),
        Runtime(network, idle(network)) as runtime,
    ):
        runtime.run()


@pytest.mark.parametrize("blocked", ["a", "b"], ids=["in_its_work", "while_it_waits"])
def test_an_interrupt_stops_everything(blocked: str) -> None:
    network = chain(firings=100_000, queues=("q", "r"))
    done: list[int] = []

    def work(firing: Firing) -> None:
        done.append(firing.label)
        time.sleep(0.01)

    runtime = Runtime(network, idle(network) | {blocked: work})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background begin with it ignored
    timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        runtime.run()
    timer.join()
    assert len(done) < 50_000
    assert not ours()


def test_a_queue_that_does_not_stop_after_an_error_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbpflow.actors.runtime.threads.GRACE", 0.1)
    monkeypatch.setattr("sbpflow.actors.runtime.threads.PATIENCE", 0.05)
    network = chain(firings=100, queues=("q", "r"))
    release = threading.Event()

    def awaits(firing: Firing) -> None:
        release.wait(LIMIT)

    runtime = Runtime(network, {"a": boom_at_once, "b": awaits}, here="q")
    with pytest.raises(Boom) as caught:
        runtime.run()
    assert re.fullmatch(r"after that r at .*test_runtime.py:\d+ did not stop within 0.1 s", caught.value.__notes__[-1])
    (left,) = [thread for thread in threading.enumerate() if thread.name in ours()]
    release.set()
    left.join(LIMIT)
    assert not ours()  # it ends as soon as its work does


def boom_at_once(firing: Firing) -> list[None]:
    if firing.label == 1:
        time.sleep(0.05)
        raise Boom("no more")
    return [None]


def test_what_does_not_fit_is_refused() -> None:
    network = chain()
    with pytest.raises(ScheduleError, match="nothing says what b shall do"):
        Runtime(network, {"a": lambda f: [1]})
    with pytest.raises(ScheduleError, match="no queue is called 'x'"):
        Runtime(network, idle(network), here="x")
    with pytest.raises(ScheduleError, match="fills 1 registers gave 2 values"):
        Runtime(network, idle(network) | {"a": lambda f: [1, 2]}).run()


def steps(runtime: Runtime, count: int) -> Sequence[RunRecord]:
    return [runtime.run(record=True) for _ in range(count)]


def test_another_queue_may_be_the_calling_threads() -> None:
    seen: dict[str, int] = {}
    network = chain(queues=("q", "r"))

    def note(name: str) -> Callable[[Firing], Any]:
        return lambda firing: seen.__setitem__(name, threading.get_ident())

    with Runtime(network, {name: note(name) for name in "ab"}, here="r") as runtime:
        steps(runtime, 2)
    assert seen["b"] == threading.get_ident() != seen["a"]
