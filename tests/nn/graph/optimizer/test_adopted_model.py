"""A model that a graph trains: parameters that no optimizer of it holds have gradients left on them."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from tests.nn.graph.alike import GRID, LINE, batch, eager, loss_fn, net, same, same_grads, same_model

STEPS: dict[str, dict[str, Any]] = {
    "straight": {"placement": LINE},
    "on a grid": {"placement": GRID},
    "clipped": {"placement": LINE, "clip_grad_norm": 0.1},
    "micro-batches": {"placement": LINE, "micro_batches": 2},
    "a scale": {"placement": LINE, "loss_scale": 8.0},
}


def second(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model[2].parameters(), lr=0.1)


@pytest.mark.parametrize("name", STEPS)
def test_a_parameter_that_the_optimizer_does_not_hold_gets_its_gradient(name: str) -> None:
    mine, one = net(), net()
    stepping, stepped = second(mine), second(one)
    step = flow.compile(mine, loss_fn, stepping, **STEPS[name])
    for at in range(2):
        step(*batch(at=at))
        eager(one, loss_fn, stepped, *batch(at=at), clip=STEPS[name].get("clip_grad_norm"))
        stepped.zero_grad()
        same_model(mine, one)
        same_grads(mine, one)


def test_a_parameter_that_an_optimizer_gets_later_is_trained_by_it() -> None:
    mine, one = net(), net()
    stepping, stepped = second(mine), second(one)
    step = flow.compile(mine, loss_fn, stepping, placement=LINE)
    for model, optimizer in ((mine, stepping), (one, stepped)):
        for at in range(2):
            step(*batch(at=at)) if model is mine else eager(one, loss_fn, optimizer, *batch(at=at))
            model.zero_grad()
            if at == 0:
                optimizer.add_param_group({"params": list(model[0].parameters())})
    same_model(mine, one)
    assert isinstance(mine[0], nn.Linear)
    same(mine[0].weight, one[0].weight)
