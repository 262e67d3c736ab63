"""The planner: its answer is a plan that runs, and costs no more than the plans that people write by hand."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sbpflow as flow


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def test_the_answer_costs_no_more_than_what_was_tried_and_says_why() -> None:
    told: list[str] = []
    with torch.device("meta"):
        model, x = net(), torch.empty(4096, 64)
    found = flow.find_plan(
        model, x, plan="grid cuda (data=2, tensor=4)", cluster="h100x8", loss_fn=loss_fn, told=told.append
    )
    names = [one.name for one in found.runners_up]
    assert names == ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP"]
    assert len(told) == len(names) + 1
    for one in found.runners_up:
        seconds = one.plan.check(model, x, cluster="h100x8", loss_fn=loss_fn).seconds
        assert found.checked.seconds * (1 - 1e-9) <= one.seconds <= seconds * (1 + 1e-9)
    assert "?" not in str(found.without_comments())
    again = flow.Plan.read(str(found)).check(model, x, cluster="h100x8", loss_fn=loss_fn)
    assert again.seconds == found.checked.seconds
    assert all(f"  {name}: " in found.table() for name in names)


def test_a_limit_leaves_out_what_does_not_fit() -> None:
    model, x = net(), torch.randn(32, 64)
    free = flow.find_plan(model, x, plan="grid (data=4)", loss_fn=loss_fn)
    others = [one.plan.check(model, x, loss_fn=loss_fn) for one in free.runners_up]
    limit = 1.01 * min(one.memory for one in (free.checked, *others))
    found = flow.find_plan(model, x, plan="grid (data=4)", memory=limit, loss_fn=loss_fn)
    assert found.checked.memory <= limit
    for one in (each for each in found.runners_up if each.why.startswith("no less than")):  # of what is the answer
        assert one.why.endswith(f"{one.seconds / found.checked.seconds - 1:+.1%}") or "more for" in one.why
    assert all("but takes" in one.why for one in found.runners_up if one.checked and one.checked.memory > limit)
    assert "expect memory <= " in str(found)


def test_without_a_grid_there_is_an_axis_for_each_level_of_the_cluster() -> None:
    with torch.device("meta"):
        model, x = net(), torch.empty(256, 64)
    found = flow.find_plan(model, x, cluster="h100x8*2", loss_fn=loss_fn)
    assert "grid cuda (data=2, tensor=8)" in str(found)


def test_without_a_card_a_plan_is_for_ranks_of_this_machine_and_batches_fit_its_axes() -> None:
    model = net()
    found = flow.find_plan(model, torch.randn(32, 64), ranks=4, loss_fn=loss_fn)
    assert "grid cpu (data=4)" in str(found)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), plan=found)
    assert step.placement is not None
    for (x,) in flow.data.shards(TensorDataset(torch.randn(64, 64)), step.placement, batch_size=32):
        step(x)
    with pytest.raises(flow.SbpError, match="how many ranks"):
        flow.find_plan(model, torch.randn(32, 64), loss_fn=loss_fn)


def test_garbage_is_collected_again_when_the_planner_ends() -> None:
    seen: list[bool] = []
    with torch.device("meta"):
        model, x = net(), torch.empty(256, 64)
    flow.find_plan(model, x, plan="grid cuda (data=2)", loss_fn=loss_fn, told=lambda line: seen.append(gc.isenabled()))
    assert seen
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(flow.SbpError):
        flow.find_plan(model, x, plan="grid cuda (data=2)\nseek memory", loss_fn=loss_fn)
    assert gc.isenabled()
    gc.disable()
    try:
        flow.find_plan(model, x, plan="grid cuda (data=2)", loss_fn=loss_fn)
        assert not gc.isenabled()
    finally:
        gc.enable()
