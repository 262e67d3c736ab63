"""What presolve drops is never needed, and what it keeps between candidates stays small."""

import numpy as np
import pytest

from sbpflow.sbp.joint.problem import Edge, Problem
from sbpflow.sbp.joint.solver.best import best_of
from sbpflow.sbp.joint.solver.fold import fold
from sbpflow.sbp.joint.solver.presolve import Model, presolve
from sbpflow.sbp.joint.solver.table import pair
from tests.sbp.joint.graphs import GRAPHS, plans, small


def model_of(problem: Problem) -> Model:
    folded = fold(problem)
    return Model(folded.costs, folded.tables)


def test_comparing_candidates_leaves_a_best_plan() -> None:
    dropped = 0
    for seed in range(GRAPHS):
        problem = small(seed)
        model = model_of(problem)
        model.compare()
        known = plans(problem)
        dropped += sum(map(len, problem.costs)) - sum(map(len, model.lives))
        assert model.dead or known, seed
        if known:
            kept = [p for p in known if all(k in model.lives[n] for n, k in enumerate(p[2]))]
            assert kept
            assert kept[0][0] <= known[0][0] + 1e-9
    assert dropped > 5 * GRAPHS


def test_what_is_done_for_all_prices_of_a_byte_is_right_at_each() -> None:
    dropped = 0
    for seed in range(GRAPHS):
        problem = small(seed)
        folded, known = fold(problem), plans(problem)
        model = Model(folded.costs, folded.tables, folded.memory)
        presolve(model)
        dropped += len(problem.costs) - len(model.left)
        for price in (0.0, 0.05, 1.0):
            found = best_of(model.priced(price), wide="elimination")
            wanted = min((cost + price * held for cost, held, _ in known), default=np.inf)
            assert found.value == pytest.approx(wanted)
            if known:
                assert problem.cost(found.choice) + price * problem.bytes(found.choice) == pytest.approx(wanted)
    assert dropped > GRAPHS


def test_equal_candidates_leave_the_first() -> None:
    row = np.random.default_rng(0).random(40)
    model = model_of(
        Problem((np.ones(30), row), (Edge(0, 1, np.tile(row, (30, 1))), Edge(0, 1, np.eye(30, 40)[::-1] * 0)))
    )
    model.compare()
    assert model.lives[0].tolist() == [0]


def test_a_candidate_forbidden_by_all_of_a_neighbour_goes_and_is_not_mourned() -> None:
    matrix = np.array([[np.inf, np.inf], [0.0, np.inf], [5.0, 1.0]])
    model = model_of(Problem((np.array([0.0, 0.0, 0.0]), np.zeros(2)), (Edge(0, 1, matrix),)))
    presolve(model)
    assert (model.constant, len(model.left)) == (0.0, 0)


def test_chains_stars_and_rings_are_solved_outright() -> None:
    rng = np.random.default_rng(1)
    for pairs in ([(0, 1), (1, 2), (2, 3)], [(0, 1), (0, 2), (0, 3)], [(0, 1), (1, 2), (2, 3), (0, 3)]):
        problem = Problem(
            tuple(rng.random(5) for _ in range(4)), tuple(Edge(i, j, rng.random((5, 5))) for i, j in pairs)
        )
        model = model_of(problem)
        presolve(model)
        assert not model.left
        assert abs(model.constant - plans(problem)[0][0]) < 1e-12


def test_a_node_that_may_not_choose_does_not_join_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    hub = np.array([1.0, *(np.inf for _ in range(7))])
    problem = Problem(
        (hub, *(rng.random(8) for _ in range(9))), tuple(Edge(0, n, rng.random((8, 8))) for n in range(1, 10))
    )
    model = model_of(problem)
    model.compare()
    assert not model.dead
    assert all(len(table.nodes) < 3 for step in model.steps for table in step.tables)


def test_a_table_has_one_row_for_all_candidates_that_it_does_not_tell_apart() -> None:
    states = np.random.default_rng(3).random((6, 7))
    rows, columns = np.arange(300) % 6, np.arange(350) // 50
    matrix = states[np.ix_(rows, columns)]
    table = pair(0, 1, matrix)
    assert table.values.shape == (6, 7)
    assert all(table.value((i, j)) == matrix[i, j] for i, j in [(0, 0), (7, 349), (299, 51)])
