"""A limit that offloading alone meets: the error says by which, and that is so when it is done."""

import re

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.errors import SbpflowError, ShortageError
from tests.nn.graph.choose.test_memory_limit import most


def net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8)))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(model(x).square().mean())


def step(width: int, limit: float, lines: str = "") -> flow.nn.Graph:
    plan = f"grid cpu (data=2)\n**: ?\nlimit memory {int(limit)} B\n{lines}"
    model = net(width)
    return flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [8, 64])
def test_states_are_said_to_fit_on_the_host_where_they_do(rows: int) -> None:
    x = torch.randn(rows, 32)
    free = step(32, 1 << 40)
    free(x)
    limit = 0.4 * most(free)
    with pytest.raises(ShortageError, match="no plan fits into") as refused:
        step(32, limit)(x)
    (line,) = re.findall(r"'(offload .*? to cpu)'", str(refused.value))
    assert f"memory={int(limit)})" in str(refused.value)
    fixed = step(32, limit, line)
    for _ in range(2):
        fixed(x)
    assert most(fixed) <= limit


def test_nothing_is_said_where_states_on_the_host_would_not_do() -> None:
    x = torch.randn(8, 32)
    with pytest.raises(ShortageError) as refused:
        step(32, 1024)(x)
    assert "offload" not in str(refused.value)
    with pytest.raises(SbpflowError):
        step(32, 1024, "offload states ** to cpu")(x)
