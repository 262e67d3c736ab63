"""Running statistics of norms in steps: those of one device, also where every batch counts alike."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S


def norms(momentum: float | None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh(), nn.Linear(4, 2)]
    return nn.Sequential(*layers).double()


def loss(model: nn.Module, x: Tensor) -> Any:
    return model(x).square().sum()


@pytest.mark.parametrize("momentum", [None, 0.25])
def test_statistics_after_several_steps(momentum: float | None) -> None:
    one, other = norms(momentum), norms(momentum)
    sgds = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (one, other)]
    p = flow.placement("cpu", range(2))
    step = flow.compile(other, loss, sgds[1], placement=p, inputs={"x": S(0)})
    for k in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        sgds[0].zero_grad()
        loss(one, x).backward()
        sgds[0].step()
        step(x)
    found: Any = other.state_dict()
    for name, wanted in one.state_dict().items():
        value = found[name]
        torch.testing.assert_close(value.full_tensor() if isinstance(value, flow.GlobalTensor) else value, wanted)
