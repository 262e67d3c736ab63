"""The simulator: times, orders and slots of small networks that can be worked out by hand."""

import sys

import pytest

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import Simulation, orders, simulate
from sbpflow.actors.schedules.pipeline import network_of
from sbpflow.actors.schedules.published import published
from tests.actors.networks import feasible
from tests.counts import calls


def times(run: Simulation, actor: str) -> list[tuple[float, float]]:
    return [(ran.start, ran.end) for ran in run.firings if ran.actor == actor]


def two(high: int, delay: float = 0.0) -> Network:
    a = Actor("a", "p", gives=(Give("x"),), firings=4, time=1.0)
    return Network((a, Actor("b", "q", (Take("x"),), time=2.0)), (Register("x", high, delay=delay),))


def test_a_slot_is_in_use_from_the_first_of_its_making_to_the_last_of_its_reading() -> None:
    run = simulate(two(high=1))
    assert times(run, "a") == [(0, 1), (3, 4), (6, 7), (9, 10)]
    assert times(run, "b") == [(1, 3), (4, 6), (7, 9), (10, 12)]
    assert (run.end, run.peak, run.finished) == (12, {"x": 1}, True)


def test_a_second_slot_lets_both_work_at_once() -> None:
    run = simulate(two(high=2))
    assert times(run, "b") == [(1, 3), (3, 5), (5, 7), (7, 9)]
    assert (run.peak, run.busy("p"), run.span("p")) == ({"x": 2}, 4, 6)


def test_a_slot_travels_as_long_as_its_register_says() -> None:
    run = simulate(two(high=4, delay=0.5))
    assert times(run, "a")[-1] == (3, 4)
    assert times(run, "b") == [(1.5, 3.5), (3.5, 5.5), (5.5, 7.5), (7.5, 9.5)]
    assert run.finished  # the end travels too, and does not overtake


def test_what_is_ready_at_one_instant_goes_by_priority() -> None:
    """0.1 + 0.2 is not 0.3, and yet the same instant."""
    late = Actor("late", "q", (Take("y"),), time=1.0)
    early = Actor("early", "q", (Take("x"),), time=1.0, kind=-1)
    sources = (
        Actor("s", "s", gives=(Give("_"),), firings=1, time=0.1),
        Actor("t", "t", (Take("_"),), (Give("x"),), time=0.2),
        Actor("u", "u", gives=(Give("y"),), firings=1, time=0.3),
    )
    assert 0.1 + 0.2 > 0.3
    run = simulate(Network((*sources, late, early), (Register("x"), Register("y"), Register("_"))))
    assert orders(run)["q"] == "early0 late0"


@pytest.mark.parametrize(
    ("a", "b", "expected"),  # kind, place, unit and group
    [
        ((0, 0, 0, 0), (0, 0, 0, 0), "a0 b0 a1 b1 a2 b2 a3 b3"),
        ((0, 0, 0, 0), (0, 1, 0, 0), "a0 a1 a2 a3 b0 b1 b2 b3"),
        ((0, 0, 0, 2), (0, 1, 0, 2), "a0 a1 b0 b1 a2 a3 b2 b3"),
        ((1, 0, 0, 0), (0, 1, 0, 0), "b0 b1 b2 b3 a0 a1 a2 a3"),
        ((1, 0, 2, 0), (0, 0, 2, 0), "b0 b1 a0 a1 b2 b3 a2 a3"),
    ],
    ids=["firing", "place", "group", "kind", "unit"],
)
def test_a_queue_goes_by_unit_kind_group_and_place(
    a: tuple[int, int, int, int], b: tuple[int, int, int, int], expected: str
) -> None:
    made = [Actor(name, "q", (), (Give(name),), 4, 0.0, *order) for name, order in (("a", a), ("b", b))]
    readers = [Actor(f"read {name}", "r", (Take(name),)) for name in "ab"]
    run = simulate(Network((*made, *readers), (Register("a", 9), Register("b", 9))))
    assert orders(run)["q"] == expected


def test_labels_say_what_is_worked_on() -> None:
    load = Actor("load", "l", gives=(Give("x", slots=2),), firings=2, time=1.0)
    work = Actor("work", "w", (Take("x"),), (Give("y"), Give("sum", every=2)), time=1.0)
    join = Actor("join", "j", (Take("y", slots=4),), time=1.0)
    step = Actor("step", "s", (Take("sum"),), time=1.0)
    registers = Register("x", 4), Register("y", 4), Register("sum")
    found = orders(simulate(Network((load, work, join, step), registers)))
    assert found == {"l": "load0 load1", "w": "work0 work1 work2 work3", "j": "join0", "s": "step0 step1"}


def test_labels_go_on_after_the_slots_that_are_filled_at_first() -> None:
    update = Actor("u", "u", (Take("grad"),), (Give("w"),))
    forward = Actor("f", "f", (Take("w"),), (Give("grad"),), firings=4)
    run = simulate(Network((forward, update), (Register("w", 2, 2), Register("grad"))))
    assert orders(run)["f"] == "f0 f1 f2 f3"


def test_the_newest_slot_goes_first_where_a_register_is_read_from_the_back() -> None:
    a = Actor("a", "p", gives=(Give("x"), Give("all")), firings=4)
    b = Actor("b", "q", (Take("x", lifo=True), Take("all", slots=4, every=4)))
    assert orders(simulate(Network((a, b), (Register("x", 4), Register("all", 4)))))["q"] == "b3 b2 b1 b0"


def test_cases_have_their_own_times_and_labels() -> None:
    several = Actor("a", "q", gives=(Give("x"),), firings=4, sequence=("F", "G", "G"), times=(("G", 2.0),), time=1.0)
    run = simulate(Network((several, Actor("b", "r", (Take("x"),))), (Register("x", 9),)))
    assert orders(run)["q"] == "F0 G0 G1 F1"
    assert run.busy("q") == 6


def test_times_can_come_from_elsewhere() -> None:
    run = simulate(two(high=1), time=lambda actor, case, label: {"a": 0.5, "b": 1.0}[actor] + label)
    assert times(run, "a")[:2] == [(0, 0.5), (1.5, 3)]


def test_a_run_that_stops_says_so() -> None:
    a = Actor("a", "p", gives=(Give("x"),), firings=4)
    run = simulate(Network((a, Actor("b", "q", (Take("x", low=1),))), (Register("x"),)))
    assert (run.finished, orders(run)) == (False, {"p": "a0"})


def test_the_end_of_one_reaches_a_thousand_at_once() -> None:
    """Nobody behind the first ever fires; that each tells the next takes no stack."""
    first = Actor("0", "q", gives=(Give("1"),), firings=1)
    rest = [
        Actor(f"{n}", "q", (Take(f"{n}", slots=2),), (Give(f"{n + 1}"),)) for n in range(1, 1 + sys.getrecursionlimit())
    ]
    registers = [Register(f"{n}", 2) for n in range(1, 2 + len(rest))]
    run = simulate(Network((first, *rest), tuple(registers)))
    assert run.finished
    assert len(run.firings) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_run_without_records_is_the_same_run(seed: int) -> None:
    first, second = simulate(feasible(seed)), simulate(feasible(seed), record=False)
    assert (first.peak, first.desk.states, second.firings) == (second.peak, second.desk.states, ())
    assert second.end == first.end == max(ran.end for ran in first.firings)


def test_a_firing_costs_the_same_few_calls_however_many_there_are() -> None:
    schedule = published("1f1b")

    def each(m: int) -> float:
        network = network_of(schedule, schedule.shape(8, m))
        assert sum(state.fired for state in simulate(network, record=False).desk.states) == 16 * m
        return calls(lambda: simulate(network, record=False)) / (16 * m)

    assert each(800) <= each(50) <= 60


def test_two_things_at_once_are_each_numbered_by_what_they_work_on() -> None:
    """The second part is one ahead, and fills what it fills with its own number, not with that of the first."""
    pair = Actor(
        "order",
        "q",
        (Take("x", case="b"),),
        (Give("y", case="a"), Give("z", case="b")),
        4,
        sequence=("b", "a&b", "a&b", "a"),
    )
    reads = [Actor(name, name, (Take(register),)) for name, register in (("ys", "y"), ("zs", "z"))]
    registers = Register("x", 3, 3), Register("y", 3), Register("z", 3)
    run = simulate(Network((pair, *reads), registers))
    assert [str(ran) for ran in run.of("q")] == ["b0", "a0&b1", "a1&b2", "a2"]
    assert [ran.label for ran in run.of("ys")] == [ran.label for ran in run.of("zs")] == [0, 1, 2]
