"""The account of memory holds the step of an optimizer too, which has its own peak where batches are small."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S

from .test_liveness import Live


@pytest.mark.parametrize("rest", [B, S(0)], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_a_step_whose_peak_is_the_optimizers_is_told(kind: Any, rest: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    flow.nn.shard(model, {"*": rest}, kind="states")
    where = flow.placement("cpu:[0-1] as (data=2)")
    step: Any = flow.compile(model, lambda m, x: m(x).sum(), kind(model.parameters()), placement=where)
    for _ in range(2):
        step(torch.ones(2, 128))
    with Live() as live:
        step(torch.ones(2, 128))
    rests = sum(of.total for of in step.memory_at_rest().values())
    assert sum(of.total for of in step.planned.held().values()) == pytest.approx(rests + live.peak, rel=0.03)
