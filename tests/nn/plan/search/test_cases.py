"""Cases: what the open problem says that a plan costs at least, it does."""

import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.plan.assignment import Assignment, assignment
from sbpflow.nn.plan.check import planned_step, priced_by
from sbpflow.nn.plan.grids import grids_of
from sbpflow.nn.plan.search.candidates import candidates
from sbpflow.nn.plan.search.cases import Cases
from sbpflow.nn.plan.search.estimates.degrees import OPEN

from .test_candidates import GRID, small


def meaning(plan: flow.Plan, model: nn.Module) -> Assignment:
    return assignment(plan, model, grids_of(plan, None))


def test_bounds_are_below_what_plans_take() -> None:
    """Of plans that people write, cuts of states that leave remainders and blocks that are run again with them."""
    model, batch = small("llama")
    plan = flow.Plan.read(GRID)
    with priced_by("h100x8"):
        cases = Cases(planned_step(next(candidates(plan, model)).plan, model, batch).plan.decided)
        some = [one for one in candidates(plan, model) if not one.opened][::12]
        texts = [str(one.plan) for one in some]
        texts += [f"{GRID}\nstates **: data=S(-1), tensor=S(-1)", f"{texts[0]}\nrecompute model.layers.*"]
        for text in texts:
            one = flow.Plan.read(text)
            bound, seconds = cases.least(meaning(one, model)), one.check(model, batch).seconds
            assert 0 < bound <= seconds * (1 + 1e-9)
            for share in (0.8, 1.0):  # of the bound, which is enough: then any above will do
                less = cases.least(meaning(one, model), share * bound * (1 - 1e-9))
                assert share * bound * (1 - 1e-9) <= less <= seconds * (1 + 1e-9)
        plain, again = (cases.least(meaning(flow.Plan.read(text), model)) for text in (texts[0], texts[-1]))
    assert again > plain


def test_nothing_is_known_of_weights_in_cuts_that_leave_remainders() -> None:
    model = nn.Sequential(nn.Linear(6, 8, device="meta"), nn.Linear(8, 3, device="meta"))
    x = torch.empty(8, 6, device="meta")
    opened = planned_step(flow.Plan.read(f"grid (data=4)\n{OPEN}"), model, x).plan.decided
    cases = Cases(opened)
    even, uneven = (meaning(flow.Plan.read(f"grid (data=4)\n{path}: data=S(0)"), model) for path in ("0", "1"))
    assert cases.least(even) >= opened.floor
    assert cases.least(uneven) == 0
