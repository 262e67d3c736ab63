"""Candidates that messages drop are in no plan as good as the best, and few are left where a bound meets it."""

import numpy as np
import pytest

from sbpflow.sbp.joint.solver.best import best
from sbpflow.sbp.joint.solver.eliminate import components
from sbpflow.sbp.joint.solver.fold import fold
from sbpflow.sbp.joint.solver.messages import narrowed
from sbpflow.sbp.joint.solver.presolve import Model, presolve
from tests.sbp.joint.graphs import GRAPHS, ladder, plans, small


def test_every_best_plan_is_kept() -> None:
    dropped = 0
    for seed in range(2 * GRAPHS):
        problem = small(seed, dense=seed % 3 == 0)
        folded = fold(problem)
        model = Model(folded.costs, folded.tables)
        known = plans(problem)
        if model.dead or not known:
            continue
        before = sum(map(len, model.lives))
        for part in components(model):
            narrowed(model, part)
        dropped += before - sum(map(len, model.lives))
        for cost, _, choice in known:
            if cost <= known[0][0] + 1e-12:
                assert all(k in model.lives[n] for n, k in enumerate(choice)), seed
    assert dropped > 5 * GRAPHS


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_that_of_elimination_alone(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folded = fold(ladder(14, 7, seed=seed))
    narrow = best(folded.costs, folded.tables, wide="elimination")
    monkeypatch.setattr("sbpflow.sbp.joint.solver.best._narrow", lambda model: None)
    plain = best(folded.costs, folded.tables, wide="elimination")
    assert narrow.choice == plain.choice
    assert narrow.value == pytest.approx(plain.value, rel=1e-12)
    assert narrow.bound == narrow.value


def test_of_a_tree_nothing_but_the_best_is_left() -> None:
    rng = np.random.default_rng(3)
    problem = ladder(9, 5)
    chain = [edge for edge in problem.edges if edge.j == edge.i + 1]
    folded = fold(type(problem)(tuple(rng.random(5) for _ in problem.costs), tuple(chain)))
    model = Model(folded.costs, folded.tables)
    exact = Model(folded.costs, folded.tables)
    presolve(exact)
    plan = narrowed(model, range(len(folded.costs)))
    assert plan is not None
    assert [live.tolist() for live in model.lives] == [[plan[n]] for n in range(len(plan))]
    assert model.value(plan) == pytest.approx(exact.constant)
