"""Proofs: what ends is let through, what does not is refused with a mark that makes it end."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from sbpflow.actors.protocol.feasibility import Mark, cycle, marked, proved, remedies, waits
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.schedules.pipeline import network_of
from sbpflow.actors.schedules.published import PUBLISHED
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.placement.errors import ScheduleError
from tests.actors.networks import chain, ends, feasible, fits, loosened, marks, tightened

F = Actor("f", "p", gives=(Give("x"),), firings=4)
B = Actor("b", "q", (Take("x", low=2),))
STUCK = Network((F, B), (Register("x", 2),), "mine")


# --- random networks ---


def test_random_networks_that_should_end_do() -> None:
    assert all(proved(feasible(seed)).finished for seed in range(500))


@pytest.mark.sweep
def test_all_random_networks_that_should_end_do() -> None:
    assert all(proved(feasible(seed)).finished for seed in range(500, 10_000))


def test_the_rule_of_marks_says_what_a_run_finds() -> None:
    """Both ways, and each often enough."""
    rng, found = random.Random(0), Counter[bool]()
    for _ in range(1000):
        m, split = rng.randint(1, 8), rng.random() < 0.5
        listed = marks(rng, rng.randint(1, 4), m)
        found[finished := simulate(chain(listed, m, split), record=False).finished] += 1
        assert fits(listed, m, split) == finished, listed
    assert min(found.values()) > 300


def judged(seed: int) -> bool:
    """Whether a random network with random marks ends; one that does not is refused, and does with what is named."""
    network = tightened(feasible(seed), random.Random(seed))
    free = simulate(loosened(network), record=False).desk.states
    firings = {actor.name: state.fired for actor, state in zip(network.actors, free, strict=True)}
    run = simulate(network)
    assert run.finished == ends(network, firings)
    if run.finished:
        return True
    with pytest.raises(ScheduleError, match="infeasible") as refused:
        proved(network)
    helps = remedies(run)
    assert str(helps[0][0]) in str(refused.value).splitlines()[-1]
    assert all(simulate(marked(network, each), record=False).finished for each in helps)
    for mark in helps[0]:  # and none changes more than it must
        less = replace(mark, value=mark.value + (1 if mark.kind == "low" else -1))
        others = [less if each == mark else each for each in helps[0]]
        assert not simulate(marked(network, others), record=False).finished
    return False


def test_random_marks_are_judged_as_by_what_must_go_before_what() -> None:
    found = Counter(judged(seed) for seed in range(120))
    assert min(found.values()) > 30


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(120, 4000, 40))
def test_all_random_marks_are_judged_so(seed: int) -> None:
    assert {judged(seed + n) for n in range(40)} == {True, False}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_published_schedules_end(name: str, p: int, m: int) -> None:
    schedule = PUBLISHED[name]
    updates = schedule.value(schedule.update, schedule.shape(p, 1), 0)
    assert proved(network_of(schedule, schedule.shape(p, m * updates))).finished


# --- what a refusal says ---


def test_a_refusal_names_who_waits_and_a_mark_that_was_tried() -> None:
    with pytest.raises(ScheduleError) as refused:
        proved(STUCK)
    assert str(refused.value).splitlines() == [
        "mine is infeasible: it stops after 2 firings",
        "  f (fired 2) waits for x: 0 of 1 free, by b",
        "  b (fired 0) waits for x: 2 of 3, its low mark, filled, by f",
        "  and so in a circle",
        "  try high=3 for x (now 2); or low=1 for x in b (now 2)",
    ]


def test_a_smaller_change_is_named_first() -> None:
    """a must fire twice before b: two more slots of y, or one less of x to wait for."""
    a = Actor("a", "p", gives=(Give("x"), Give("y", slots=2)), firings=4)
    b = Actor("b", "q", (Take("x", low=1), Take("y", slots=2)))
    found = remedies(simulate(Network((a, b), (Register("x", 4), Register("y", 2)))))
    assert found == [(Mark("x", "low", 0, 1, "b", 0),), (Mark("y", "high", 4, 2),)]


def test_marks_that_help_only_together_are_named_together() -> None:
    tight = Schedule("tight", act="p-s", low_b="p-s")
    network = network_of(tight, tight.shape(3, 8))
    with pytest.raises(
        ScheduleError, match=r"try high=4 for act.0 \(now 3\) and high=3 for act.1 \(now 2\) and high=2"
    ) as no:
        proved(network)
    assert "4 others wait as well" in str(no.value)
    assert all(len(each) == 3 for each in remedies(simulate(network)))


def test_where_no_mark_helps_the_circle_is_named() -> None:
    a = Actor("a", "p", (Take("y"),), (Give("x"),), firings=3)
    b = Actor("b", "p", (Take("x"),), (Give("y"),))
    with pytest.raises(ScheduleError, match="no mark helps: fill some of these slots at first") as refused:
        proved(Network((a, b), (Register("x", 2), Register("y", 2))))
    assert "a (fired 0) waits for y: 0 of 1 filled, by b" in str(refused.value)
    assert proved(Network((a, b), (Register("x", 2), Register("y", 2, 1)))).finished


def test_a_reader_that_has_ended_is_named() -> None:
    network = Network((F, replace(B, takes=(Take("x"),), firings=1)), (Register("x", 1),))
    (wait,) = waits(simulate(network).desk)
    assert str(wait) == "f (fired 2) waits for x: 0 of 1 free, by b, which has ended"
    with pytest.raises(ScheduleError, match=re.escape("try high=3 for x (now 1)")):
        proved(network)


# --- runs that end too early ---


def test_firings_that_are_never_reached_are_refused() -> None:
    network = Network((F, replace(B, takes=(Take("x"),), firings=5)), (Register("x", 2),))
    with pytest.raises(ScheduleError, match="b is to fire 5 times, and what it takes ends after 4"):
        proved(network)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 5])
def test_a_group_that_is_cut_short_is_refused(every: int) -> None:
    b = Actor("b", "q", (Take("x"),), (Give("sum", every=every),))
    network = Network((F, b, Actor("u", "q", (Take("sum"),))), (Register("x", 2), Register("sum")))
    if 4 % every == 0:
        assert proved(network).finished
    else:
        left = f"b fills sum once in {every} firings, and the last group has only {4 % every}"
        with pytest.raises(ScheduleError, match=left):
            proved(network)


def test_a_slot_that_is_not_held_to_the_end_of_its_group_is_refused() -> None:
    network = Network((F, replace(B, takes=(Take("x", every=3),), firings=8)), (Register("x", 2),))
    with pytest.raises(ScheduleError, match="b takes x once in 3 firings, and the last group has only 2"):
        proved(network)


# --- waits ---


def test_waits_of_a_desk_at_work_end_at_who_is_at_work() -> None:
    c = Actor("c", "r", (Take("y"),))
    desk = simulate(
        Network((F, replace(B, takes=(Take("x"),), gives=(Give("y"),)), c), (Register("x"), Register("y")))
    ).desk
    assert not waits(desk)
    desk = type(desk)(desk.wiring)
    desk.fire(0)
    found = waits(desk)
    assert [str(wait) for wait in cycle(found)] == ["f (fired 0) is at work"]
    assert cycle(found[1:] + found[:1]) == (found[1], found[0])
    assert found[2].by == "b"


def test_an_actor_that_is_ready_waits_for_its_queue() -> None:
    network = Network((F, Actor("g", "p", gives=(Give("y"),), firings=1), B), (Register("x", 2), Register("y")))
    desk = simulate(network).desk
    desk = type(desk)(desk.wiring)
    assert "g (fired 0) is ready" in str(waits(desk)).splitlines()[1]
    desk.fire(0)
    assert "g (fired 0) is ready and waits for its queue, where f is at work" in str(waits(desk))


def test_the_shortest_circle_is_found_among_many_waits() -> None:
    found = waits(simulate(network_of(tight := Schedule("t", act="p-s", low_b="p-s"), tight.shape(6, 9))).desk)
    circle = cycle(found)
    assert len(found) > 12
    assert [(wait.actor, wait.what) for wait in circle] == [("F0", "freed"), ("B0", "low")]
    assert str(found).splitlines()[2].strip() == "and so in a circle"
