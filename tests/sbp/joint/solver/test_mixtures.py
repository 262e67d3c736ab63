"""A plan fits in its memory, and the bound says how near it is to the best that does."""

from dataclasses import replace

import numpy as np
import pytest

from sbpflow.sbp.joint.problem import Edge, Problem
from sbpflow.sbp.joint.solver.best import Best
from sbpflow.sbp.joint.solver.measured import Drawn, Measured
from sbpflow.sbp.joint.solver.multipliers import At
from sbpflow.sbp.joint.solver.search import Search
from sbpflow.sbp.joint.solver.solve import Solver, solve
from tests.sbp.joint.graphs import GRAPHS, plans, small, transformer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True], ids=["loose", "tied"])
def test_plans_fit_and_are_within_their_gap_of_the_best(tied: bool) -> None:
    exact = tried = 0
    for seed in range(GRAPHS // 2):
        problem = small(seed, tied=tied)
        known = plans(problem)
        if not known:
            continue
        every = plans(problem, ties=False)
        free, least = solve(problem), min(held for _, held, _ in known)
        for share in (0.0, 0.3, 0.7):
            limit = least + max(0.0, share * (free.memory - least))
            found = solve(problem, limit=limit)
            best = min(seconds for seconds, held, _ in known if held <= limit)
            assert found.fits
            assert found.memory == problem.bytes(found.choice) <= limit
            assert found.bound <= best + 1e-9
            assert found.cost <= best + found.gap * found.cost + 1e-9
            assert found.cost >= min(seconds for seconds, held, _ in every if held <= limit) - 1e-9
            assert found.runner_up is None or problem.bytes(found.runner_up.choice) <= limit
            tried, exact = tried + 1, exact + (found.cost <= best + 1e-9)
    assert exact > 0.9 * tried > GRAPHS // 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True], ids=["loose", "tied"])
def test_what_ended_a_search_starts_another_with_other_bytes(tied: bool) -> None:
    exact = tried = 0
    for seed in range(GRAPHS // 8):
        problem = small(seed, tied=tied)
        if not plans(problem):
            continue
        solver, near = Solver(problem), None
        for times in (1.0, 1.3, 0.9, 1.31):
            memory = tuple(times * held for held in problem.memory)
            known = plans(replace(problem, memory=memory))
            least, most = min(held for _, held, _ in known), max(held for _, held, _ in known)
            limit = least + 0.3 * (most - least)
            found = solver.solve(memory, limit, near=near)
            best = min(seconds for seconds, held, _ in known if held <= limit)
            assert found.memory == replace(problem, memory=memory).bytes(found.choice) <= limit
            assert found.bound <= best + 1e-9
            near, tried, exact = found.near, tried + 1, exact + (found.cost <= best + 1e-9)
    assert exact > 0.9 * tried > GRAPHS // 4


def test_a_search_that_starts_near_looks_less(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    look = Search.look

    def counted(self: Search, left: Measured, at: At) -> tuple[Best, Drawn | None]:
        looks.append(at)
        return look(self, left, at)

    monkeypatch.setattr(Search, "look", counted)
    problem = transformer(12, 12, 12)
    solver = Solver(problem)
    limit = 0.7 * solver.solve(problem.memory, None).memory
    first = solver.solve(problem.memory, limit, branches=0)
    cold = len(looks)
    again = solver.solve(tuple(1.001 * held for held in problem.memory), limit, branches=0, near=first.near)
    assert again.fits
    assert again.gap < first.gap + 1e-2
    assert 2 * (len(looks) - cold) <= cold


def test_what_cannot_fit_tells_the_least_that_is_needed() -> None:
    for seed in range(GRAPHS // 4):
        problem = small(seed)
        known = plans(problem)
        if known:
            least = min(held for _, held, _ in known)
            found = solve(problem, limit=least - 1)
            assert (found.choice, found.fits, found.cost, found.least) == ((), False, np.inf, least)


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    problem = small(4)
    free = solve(problem)
    assert solve(problem, limit=free.memory).choice == free.choice


def test_equal_blocks_choose_differently_where_memory_lies_between() -> None:
    count = 10
    cost, held = np.array([1.0, 2.0]), np.array([10.0, 4.0])
    turn = np.array([[0.0, 0.01], [0.01, 0.0]])
    edges = tuple(Edge(n, n + 1, turn) for n in range(count - 1))
    problem = Problem((cost,) * count, edges, (held,) * count, (0,) * count)
    found = solve(problem, limit=70.0)  # 5 blocks of 10 and 5 of 4 bytes
    assert sorted(found.choice) == [0] * 5 + [1] * 5
    assert found.cost == pytest.approx(15.01)  # one place where blocks turn
    assert found.bound == pytest.approx(15.0)


@pytest.mark.sweep
def test_deep_transformers_come_within_a_thousandth_of_their_bound() -> None:
    problem = transformer(48, 24, 12)
    free = solve(problem)
    for share in (0.8, 0.5):
        found = solve(problem, limit=share * free.memory)
        assert found.fits
        assert found.memory <= share * free.memory
        assert found.gap < 1e-3
