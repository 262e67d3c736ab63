"""A step whose loss or gradients are not finite on one rank changes nothing on any, and it is told where that began."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B
from sbpflow.nn.graph.optimizer.nonfinite import SkippedSteps
from sbpflow.placement.errors import SbpError, ScheduleError
from tests.ranks import Ranks

PIPE = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
Loss = Any


def mean_square(model: nn.Module, x: Tensor) -> Loss:
    return model(x).square().mean()


def steep(model: nn.Module, x: Tensor) -> Loss:
    """A loss that is finite, of which the gradient of a root is not, where an input is zero."""
    first: Any = model
    return model(x).mean() + first[0](x).abs().sqrt().mean()


def made(kind: str, loss: Loss = mean_square, **more: Any) -> tuple[nn.Sequential, Any, Any]:
    torch.manual_seed(0)
    middle: Any = nn.Tanh() if kind == "stages" else nn.BatchNorm1d(8)
    net = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 4))
    options: dict[str, Any] = {"placement": flow.placement("cpu", [0, 1])}
    if kind == "stages":
        flow.nn.place(net[:2], PIPE[0])
        flow.nn.place(net[2:], PIPE[1])
        options = {"micro_batches": 2}
    elif kind == "zero":
        flow.nn.shard(net, {"*": B})
        flow.nn.shard(net, {"*.weight": "S(0)"}, kind="states")
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step = flow.compile(net, loss, optimizer, skip_nonfinite=True, clip_grad_norm=1.0, **options, **more)
    return net, optimizer, step


def state(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """All that a process has of a model and its optimizer."""
    kept: list[Any] = [x for each in optimizer.state.values() for x in each.values()]
    found: list[Any] = []
    for x in [*net.state_dict().values(), *kept]:
        found += getattr(x, "_shards", [x])
    return [x.detach().clone() for x in found]


def skipping(kind: str) -> tuple[Any, ...]:
    """How often a step of three was left out, whether it changed anything, and whether those around it did."""
    net, optimizer, step = made(kind)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    bad = x.clone()
    bad[-1, 0] = torch.nan  # a sample of the last rank, or micro-batch
    step(x)
    first = state(net, optimizer)
    step(bad)
    second = state(net, optimizer)
    norm = float(step.grad_norm)
    step(x)
    third = state(net, optimizer)
    same = all(map(torch.equal, first, second))
    moved = not all(map(torch.equal, second, third))
    return step.skipped.count, step.skipped.loss, same, moved or not first, norm != norm, str(step.skipped)


@pytest.mark.parametrize("kind", ["whole", "zero", "stages"])
def test_a_step_that_is_not_finite_changes_nothing(kind: str) -> None:
    count, loss, same, moved, norm, text = skipping(kind)
    assert (count, loss, same, moved, norm) == (1, True, True, True, True)
    assert text.startswith("1 step left out; not finite in the last: the loss, the gradient of ")


@pytest.mark.parametrize("kind", ["stages", "whole"])
def test_all_ranks_skip_together(kind: str, ranks4: Ranks) -> None:
    found = ranks4(skipping, kind)[:2]
    assert [each[:5] for each in found] == [(1, True, True, True, True)] * 2
    assert found[0][5] == found[1][5]


def test_the_first_gradient_that_was_not_finite_is_named() -> None:
    net, _, step = made("whole", steep)
    with torch.no_grad():
        net.get_parameter("0.bias").zero_()
    step(torch.zeros(8, 6))
    assert step.skipped.loss is False
    assert step.skipped.gradients == ("0.weight", "0.bias")
    assert step.skipped.first == "the gradient of 0.bias"
    assert "on ranks 0, 1; first: the gradient of 0.bias" in str(step.skipped)


def test_a_weight_that_was_bad_before_is_named() -> None:
    net, _, step = made("whole")
    x = torch.randn(8, 6)
    step(x)
    assert (str(step.skipped), step.skipped.first) == ("no step was left out", "")
    with torch.no_grad():
        net.get_parameter("2.weight").fill_(torch.nan)
    step(x)
    assert step.skipped.first == "the weight 2.weight, before the step"


def test_overflows_of_fp16_are_counted() -> None:
    skipped = SkippedSteps()
    skipped.overflow()
    assert str(skipped) == "1 step left out; the last by the loss scale"


def test_what_cannot_be_left_out_is_refused() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    where, x = flow.placement("cpu", [0, 1]), torch.randn(8, 6)
    with pytest.raises(SbpError, match="no step that could be left out"):
        flow.compile(net, mean_square, placement=where, skip_nonfinite=True)(x)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(SbpError, match="make it with skip_nonfinite=True"):
        _ = flow.compile(net, mean_square, optimizer, placement=where).skipped
    with pytest.raises(SbpError, match="say True or False"):
        flow.compile(net, mean_square, optimizer, placement=where, **{"skip_nonfinite": 1})  # type: ignore[call-overload]
    flow.nn.place(net[0], PIPE[0])
    flow.nn.place(net[1], PIPE[1])
    step = flow.compile(net, mean_square, optimizer, micro_batches=4, schedule="pipedream", skip_nonfinite=True)
    with pytest.raises(ScheduleError, match="is to leave steps out"):
        step(x)
