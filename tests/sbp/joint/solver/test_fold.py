"""A folded problem prices every choice that keeps the ties as the whole one does."""

import numpy as np
import pytest

from sbpflow.sbp.joint.problem import Edge, Problem
from sbpflow.sbp.joint.solver.fold import fold
from sbpflow.sbp.joint.solver.solve import solve
from tests.counts import calls
from tests.sbp.joint.graphs import GRAPHS, plans, small, transformer


def test_every_choice_costs_and_holds_the_same() -> None:
    for seed in range(GRAPHS):
        problem = small(seed, tied=True)
        folded = fold(problem)
        sizes = [len(cost) for cost in folded.costs]
        rng = np.random.default_rng(seed)
        for _ in range(10):
            choice = [int(rng.integers(size)) for size in sizes]
            assert folded.cost(choice) == pytest.approx(problem.cost(folded.expand(choice)))
            assert folded.bytes(choice) == problem.bytes(folded.expand(choice))


def test_the_plan_is_the_one_found_where_ties_are_said_by_edges() -> None:
    for seed in range(GRAPHS // 2):
        problem = small(seed, tied=True)
        equal = []
        for i, number in enumerate(problem.tied):
            for j in range(i):
                if number >= 0 and problem.tied[j] == number:
                    size = len(problem.costs[i])
                    equal.append(Edge(i, j, np.where(np.eye(size, dtype=bool), 0.0, np.inf)))
        said = solve(Problem(problem.costs, (*problem.edges, *equal), problem.memory))
        known = plans(problem)
        assert said.cost == pytest.approx(known[0][0] if known else np.inf)
        folded = solve(problem)
        assert folded.cost == pytest.approx(min(said.cost, folded.greedy))


def test_edges_within_and_between_tied_nodes_are_counted() -> None:
    matrix = np.array([[1.0, 10.0], [100.0, 1000.0]])
    costs = (np.zeros(2), np.zeros(2), np.zeros(2))
    folded = fold(Problem(costs, (Edge(0, 1, matrix), Edge(2, 0, matrix), Edge(1, 2, matrix)), tied=(7, 7, -1)))
    assert [cost.tolist() for cost in folded.costs] == [[1.0, 1000.0], [0.0, 0.0]]
    (table,) = folded.tables
    assert [[table.value((a, b)) for b in (0, 1)] for a in (0, 1)] == (matrix + matrix.T).tolist()


def test_edges_to_a_node_without_a_choice_are_costs_of_the_other() -> None:
    row = np.array([[1.0, 10.0]])
    costs = (np.zeros(1), np.zeros(2), np.ones(1))
    folded = fold(Problem(costs, (Edge(0, 1, row), Edge(1, 2, row.T), Edge(0, 2, np.full((1, 1), 5.0)))))
    assert folded.tables == ()
    assert [folded.cost((0, k, 0)) for k in (0, 1)] == [8.0, 26.0]


def test_nodes_of_different_candidates_cannot_be_tied() -> None:
    with pytest.raises(AssertionError):
        fold(Problem((np.zeros(2), np.zeros(3)), (), tied=(0, 0)))


def test_deep_models_fold_in_calls_that_grow_with_their_depth() -> None:
    problem, half = transformer(96, 60, 40), transformer(48, 60, 40)
    assert len(fold(problem).costs) == 180  # the first block, the one that all others share, and the last
    assert calls(lambda: fold(problem)) < 2.2 * calls(lambda: fold(half))
