"""What one node may do while the others stay."""

import numpy as np
import pytest

from sbpflow.sbp.joint.problem import Edge, Problem
from sbpflow.sbp.joint.solver.local_search import greedy, swaps
from sbpflow.sbp.joint.solver.solve import solve
from tests.sbp.joint.graphs import GRAPHS, small


def test_a_swap_costs_what_it_says_and_no_other_is_cheaper() -> None:
    for seed in range(GRAPHS // 2):
        problem = small(seed)
        found = solve(problem)
        for node, swap in enumerate(swaps(problem, found.choice)):
            every = [
                problem.cost((*found.choice[:node], k, *found.choice[node + 1 :])) - found.cost
                for k in range(len(problem.costs[node]))
                if k != found.choice[node]
            ]
            assert swap.seconds == pytest.approx(min(every, default=np.inf))
            assert swap.seconds >= -1e-9
            assert (swap.candidate < 0) == (swap.seconds == np.inf)


def test_greedy_looks_back_only() -> None:
    matrix = np.array([[9.0, 9.0], [0.0, 0.0]])
    problem = Problem((np.array([0.0, 1.0]), np.array([1.0, 0.0])), (Edge(0, 1, matrix), Edge(1, 1, 3 * np.eye(2))))
    assert greedy(problem) == (0, 1)
    assert problem.cost((0, 1)) == 12.0
