"""Models of many families of four libraries train under plans as on one device: docs/evidence/plan_families.md."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.nn.families import said, table
from tests.nn.plan.families import COLUMNS, PAGE, PLANNED, Size, apart, outcome

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_family_and_plan() -> None:
    assert table(PAGE).keys() == {(name, plan) for name in PLANNED for plan in COLUMNS}
    assert all(f"\n{column.plan}\n" in PAGE.read_text() for column in COLUMNS.values())


@pytest.mark.sampled(1, sweep=len(PLANNED))
@pytest.mark.parametrize("plan", COLUMNS)
@pytest.mark.parametrize("name", PLANNED)
def test_a_family_trains_under_a_plan_as_the_page_says(name: str, plan: str) -> None:
    assert said(outcome(name, COLUMNS[plan])) == table(PAGE)[name, plan]


def test_a_step_that_is_none_by_its_plan_is_told() -> None:
    """So few tokens are gathered and computed everywhere: right, but not what the column is for."""
    with pytest.raises(AssertionError, match="it sends \\['forward all_gather over data'\\]"):
        outcome("llama", replace(COLUMNS["data parallel"], size=Size(4, 2)))


def test_what_is_apart_is_told_by_what_changed() -> None:
    before, one = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    one.load_state_dict({name: value + 1e-4 for name, value in before.state_dict().items()})
    model = copy.deepcopy(one)
    with torch.no_grad():
        model.bias.add_(1e-5)
    off = apart(model, one, before)
    assert off["weight"] == 0
    assert 0.08 < off["bias"] < 0.12
