"""`to_global` of modules: what is one value stays one, and a call that is refused changes nothing."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpflowError

P2 = flow.placement("cpu", range(2))


class Shared(nn.Module):
    """A layer that stands in three places, and a head that has its weight."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer] * 3)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = layer.weight
        self.more = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


def test_a_weight_of_a_layer_that_stands_in_several_places_stays_tied() -> None:
    model = Shared()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    flow.nn.to_global(model, P2, {"*.weight": S(0)})
    assert model.head.weight is model.layers[2].weight
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name].full_tensor(), before[name]) for name in before)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "sbp", [{"more.2.weight": S(7)}, {"nothing": B}, lambda name, value: S(int(name == "more.3.bias"))]
)
def test_a_call_that_is_refused_changes_nothing(sbp: Any) -> None:
    model = Shared()
    before = dict(model.named_parameters())
    with pytest.raises(SbpflowError, match=r"to_global"):
        flow.nn.to_global(model, P2, sbp)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is value for name, value in before.items())


def test_an_optimizer_made_before_a_global_model_was_laid_otherwise_is_refused() -> None:
    """It held what nothing used any more, and stepped without a word."""
    here, there = flow.placement("cpu", [0]), flow.placement("cpu", [0, 1])
    model = flow.nn.to_global(nn.Linear(2, 2), here)
    optimizer = torch.optim.AdamW(model.parameters())
    flow.nn.to_global(model, there, S(0))
    model(flow.ones(3, 2, placement=there, sbp=B)).sum().backward()
    with pytest.raises(SbpflowError, match="made before to_global, and holds the weight that was replaced"):
        optimizer.step()
    with pytest.raises(SbpflowError, match="holds a parameter"):
        flow.compile(model, lambda model, x: model(x).sum(), optimizer)(torch.ones(3, 2))
