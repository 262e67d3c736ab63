"""More graphs of the kinds that the tests of solvers draw."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.sbp.joint.graphs import MANY_GRAPHS
from tests.sbp.joint.solver import test_best, test_local_search, test_mixtures, test_presolve, test_solve

DRAWN: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (test_best.test_the_integer_program_finds_the_best_of_small_graphs, {}),
    (test_best.test_a_bound_is_one_and_the_plan_beats_greedy, {}),
    (test_best.test_the_runner_up_of_an_integer_program_is_another_plan_and_no_better, {}),
    (test_mixtures.test_plans_fit_and_are_within_their_gap_of_the_best, {"tied": True}),
    (test_mixtures.test_plans_fit_and_are_within_their_gap_of_the_best, {"tied": False}),
    (test_mixtures.test_what_ended_a_search_starts_another_with_other_bytes, {"tied": True}),
    (test_mixtures.test_what_ended_a_search_starts_another_with_other_bytes, {"tied": False}),
    (test_mixtures.test_what_cannot_fit_tells_the_least_that_is_needed, {}),
    (test_presolve.test_comparing_candidates_leaves_a_best_plan, {}),
    (test_presolve.test_what_is_done_for_all_prices_of_a_byte_is_right_at_each, {}),
    (test_solve.test_the_plan_is_the_best_of_all_and_the_runner_up_the_next, {"tied": True}),
    (test_solve.test_the_plan_is_the_best_of_all_and_the_runner_up_the_next, {"tied": False}),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("law", "options"), DRAWN, ids=lambda value: getattr(value, "__name__", None))
def test_it_holds_of_more_graphs(
    law: Callable[..., None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (test_best, test_local_search, test_mixtures, test_presolve, test_solve):
        monkeypatch.setattr(module, "GRAPHS", MANY_GRAPHS)
    law(**options)
