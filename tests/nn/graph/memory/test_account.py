"""The account of memory holds the step of an optimizer too, which has its own peak where batches are small."""

from functools import partial
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


class Table(nn.Module):
    """It keeps numbers that are neither a parameter nor a buffer, as VideoMAE its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.table = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), torch.arange(32.0).view(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.table
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("plan", ["grid (data=2)", "grid (pipe=2)\npipe layers over pipe by 1f1b, 2 micro-batches"])
def test_constants_rest_nowhere(plan: str) -> None:
    model = Table()
    step: Any = flow.compile(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), plan=plan)
    step(torch.ones(4, 4, 8))
    held = {rank: of.parameters for rank, of in step.memory_at_rest().items()}
    assert held == {rank: of.parameters for rank, of in step.planned.held().items()}


class Scaled(nn.Module):
    """Its scale is a number, as CLIP's of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.layer(x) * self.scale
        return scaled


@pytest.mark.parametrize("kind", [partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_states_of_a_number_rest_too(kind: Any) -> None:
    model = Scaled()
    step: Any = flow.compile(model, lambda m, x: m(x).sum(), kind(model.parameters()), plan="grid (data=2)")
    step(torch.ones(4, 8))
    held = {rank: (of.parameters, of.states) for rank, of in step.memory_at_rest().items()}
    assert held == {rank: (of.parameters, of.states) for rank, of in step.planned.held().items()}
