"""Mixtures of experts of transformers train under expert plans as on one device: docs/evidence/expert_plans.md."""

import pytest

from tests.nn.families import said, table
from tests.nn.plan.expert_plans import MIXTURES, PAGE, PLANS, outcome

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_mixture_and_plan() -> None:
    assert table(PAGE).keys() == {(name, plan) for name in MIXTURES for plan in PLANS}
    assert all(f"\n{plan}\n" in PAGE.read_text() for plan in PLANS.values())


@pytest.mark.sampled(1, sweep=len(MIXTURES))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_trains_under_a_plan_as_the_page_says(name: str, plan: str) -> None:
    assert said(outcome(name, plan)) == table(PAGE)[name, plan]
