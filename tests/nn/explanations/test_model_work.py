"""The work of a step: FLOPs as torch counts them, whatever the plan, and in its report."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sbpflow as flow


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
    return torch.as_tensor(net(x).square().mean())


def counted(rows: int) -> float:
    """By torch's own counter, on one device."""
    net = model()
    with FlopCounterMode(display=False) as counter:
        loss_fn(net, torch.ones(rows, 8)).backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    "plan",
    [
        "grid (data=2)",
        "grid (data=2)\n**: data=S(0)",
        "grid (data=2)\n3 micro-batches",  # of 2, 2 and 2 samples
        "grid (data=1)\n4 micro-batches",  # of 2, 2, 1 and 1 samples
    ],
)
def test_the_flops_of_a_step_are_those_that_torch_counts(plan: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = flow.compile(net, loss_fn, optimizer, plan=plan)
    report = step.plan_for(torch.ones(6, 8)).explain()
    assert report.flops == sum(report.work.values()) == counted(6)
    assert json.loads(json.dumps(report.dict()))["flops"] == {"float32": counted(6)}


def test_a_step_without_a_loss_has_no_backward() -> None:
    net = model()
    report = flow.compile(net, plan="grid (data=2)").plan_for(torch.ones(6, 8)).explain()
    assert report.flops == 2 * 6 * (8 * 16 + 16 * 4)
