"""What is too wide for elimination gets the same plan from an integer program, or a good one and a bound."""

import numpy as np
import pytest

from sbpflow.sbp.joint.solver import ilp
from sbpflow.sbp.joint.solver.best import best
from sbpflow.sbp.joint.solver.eliminate import components, order
from sbpflow.sbp.joint.solver.fold import fold
from sbpflow.sbp.joint.solver.presolve import Model, presolve
from sbpflow.sbp.joint.solver.solve import solve
from tests.sbp.joint.graphs import GRAPHS, ladder, plans, small


def test_the_integer_program_finds_the_best_of_small_graphs() -> None:
    pytest.importorskip("scipy")
    met = 0
    for seed in range(GRAPHS // 2):
        problem = small(seed, dense=True)
        known, found = plans(problem), solve(problem, table=0, wide="ilp")
        met += found.method == "ilp"
        assert found.cost == pytest.approx(known[0][0] if known else np.inf)
        assert found.bound == pytest.approx(found.cost)
    assert met > GRAPHS // 8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("unit", [1e-6, 1.0], ids=["microseconds", "seconds"])
@pytest.mark.parametrize("seed", range(3))
def test_elimination_and_the_integer_program_agree(seed: int, unit: float) -> None:
    pytest.importorskip("scipy")
    folded = fold(ladder(14, 6, seed=seed))
    costs = [cost * unit for cost in folded.costs]
    tables = [type(t)(t.nodes, t.values * unit, t.classes) for t in folded.tables]
    exact, program = best(costs, tables, wide="elimination"), best(costs, tables, table=0, wide="ilp")
    assert (exact.method, program.method) == ("elimination", "ilp")
    assert program.choice == exact.choice
    assert program.bound == pytest.approx(exact.value, rel=1e-6)


def test_a_bound_is_one_and_the_plan_beats_greedy() -> None:
    met = 0
    for seed in range(GRAPHS // 2):
        problem = small(seed, dense=True)
        known, found = plans(problem), solve(problem, table=8, wide="bounded")
        if not known:
            assert found.choice == ()
        elif found.choice:
            met += found.method == "bounded"
            assert found.bound <= known[0][0] + 1e-9
            assert found.cost <= found.greedy
            assert found.cost >= known[0][0] - 1e-9
            assert (found.cost - known[0][0]) <= found.gap * found.cost + 1e-9
        else:
            assert found.bound <= known[0][0] + 1e-9  # none was found, but none is proven not to be
    assert met > GRAPHS // 8


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_wide_graphs_are_near_the_best(seed: int) -> None:
    problem = ladder(16, 8, seed=seed)
    exact, found = solve(problem), solve(problem, table=500, wide="bounded")
    assert found.method == "bounded"
    assert found.bound <= exact.cost <= found.cost + 1e-9
    assert found.cost <= 1.02 * exact.cost < found.greedy


def test_sizes_on_paper_are_those_met() -> None:
    folded = fold(ladder(14, 6))
    model = Model(folded.costs, folded.tables)
    presolve(model)
    for part in components(model):
        way, peak = order(model, part)
        assert sorted(way) == part
        largest = 0
        for node in way:
            before = len(model.steps)
            model.eliminate(node)
            assert len(model.steps) == before + 1
            largest = max([largest, *(table.values.size for table in model.among(model.left))])
        assert largest <= peak


def test_a_program_too_large_is_left_to_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    problem = ladder(14, 6)
    assert solve(problem, table=0, wide="ilp").method == "ilp"
    monkeypatch.setattr(ilp, "COLUMNS", 100)
    found = solve(problem, table=100, wide="ilp")
    assert found.method == "bounded"
    assert found.bound <= found.cost < found.greedy


def test_the_runner_up_of_an_integer_program_is_another_plan_and_no_better() -> None:
    pytest.importorskip("scipy")
    met = 0
    for seed in range(GRAPHS // 4):
        problem = small(seed, dense=True)
        found = solve(problem, table=0, wide="ilp")
        if found.method == "ilp" and found.runner_up is not None:
            met += 1
            assert found.runner_up.choice != found.choice
            assert found.runner_up.cost == pytest.approx(problem.cost(found.runner_up.choice))
            assert found.runner_up.cost >= found.cost - 1e-12
            assert found.runner_up.cost < np.inf
    assert met > 3
