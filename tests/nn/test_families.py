"""Models of many families of four libraries train as on one device, or are refused: docs/evidence/families.md."""

import copy
from typing import Any

import pytest
import torch

import sbpflow as flow
from tests.nn.families import (
    FAMILIES,
    PAGE,
    WAYS,
    distance,
    everything,
    known,
    losses_of,
    made,
    outcome,
    plain,
    rows_of,
    said,
    sgd,
    table,
)

# transformers says which kernels of others it does not find, and warns of its own names.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_page_has_every_family() -> None:
    assert table().keys() == {(name, way) for name in FAMILIES for way in WAYS}


def test_rows_that_are_kept_stay_as_they_are() -> None:
    assert rows_of(known(PAGE), FAMILIES, WAYS) in PAGE.read_text()


@pytest.mark.sampled(2, sweep=len(FAMILIES))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_as_the_page_says(name: str, way: str) -> None:
    assert said(outcome(name, way)) == table()[name, way]


@pytest.mark.parametrize("way", ["graph", "pipeline"])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.otherwise])
def test_what_is_refused_is_right_with_what_the_page_says(name: str, way: str) -> None:
    assert "refused" in {table()[name, other] for other in WAYS}
    assert said(outcome(name, way, otherwise=True)) == "right"


IN_GROUPS = ["mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next"]


@pytest.mark.sweep
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize("name", IN_GROUPS)
def test_experts_in_groups_train_in_stages(name: str, micro_batches: int) -> None:
    """In single precision, because products of groups take no more; micro-batches of 8 samples in 3 are uneven."""
    model: Any = made(name).float().eval()
    model.config._experts_implementation = "grouped_mm"
    one, batches = copy.deepcopy(model), [FAMILIES[name].batch() for _ in range(2)]
    flow.nn.pipeline(model.model.layers, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
    step = flow.compile(model, FAMILIES[name].loss, sgd(model), micro_batches=micro_batches)
    torch.testing.assert_close(losses_of(step, batches), losses_of(plain(one), batches), rtol=1e-5, atol=1e-5)
    mine = dict(everything(model))
    assert max(distance(mine[name], value) for name, value in everything(one)) < 1e-5
