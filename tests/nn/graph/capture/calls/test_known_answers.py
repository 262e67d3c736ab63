"""Branches on tensors whose answer is known: draws above a chance of 0, and parameters that are set to themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import sbpflow as flow

HOW: dict[str, Any] = {"placement": flow.placement("cpu", range(2)), "backend": "code"}


class Skipped(nn.Module):
    """A layer that leaves itself out with a chance."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.layer, self.chance = nn.Linear(4, 4), chance

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if torch.rand(1) > self.chance else x


def test_a_layer_left_out_with_chance_0_is_always_there_and_draws_as_alone() -> None:
    model, x = nn.Sequential(Skipped(0.0), nn.Dropout(0.5), Skipped(0.0), nn.Dropout(0.5)), torch.ones(6, 4)
    torch.manual_seed(3)
    alone = model(x).detach()
    step = flow.compile(model, **HOW)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.allclose(step(x).full_tensor(), alone)


@pytest.mark.parametrize("chance", [0.5, 1e-9])
def test_any_other_chance_is_refused(chance: float) -> None:
    with pytest.raises(flow.SbpError, match="an if on a tensor"):
        flow.compile(Skipped(chance), **HOW)(torch.ones(6, 4))


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def test_a_forward_that_parametrizes_a_layer_for_itself() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            parametrize.register_parametrization(self.layer, "weight", Twice())
            try:
                made: Tensor = self.layer(x)
                return made
            finally:
                parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)

    model, x = Doubled(), torch.randn(6, 4)
    alone = model(x).detach()
    step = flow.compile(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1), **HOW)
    step(x)
    assert isinstance(model.layer.weight, flow.GlobalTensor)
    assert not torch.allclose(model(x).full_tensor(), alone)
