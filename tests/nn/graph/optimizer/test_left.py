"""Gradients that a step leaves on parameters, for whoever steps the optimizer: a loop of one's own, or a trainer."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, batch, loss_fn, net, same, same_grads, same_model, sgd

PLANS = {
    "data": "grid cpu (data=4)",
    "ZeRO-3": "grid cpu (data=4)\n**: data=S(0)",
    "tensor": "grid cpu (data=2, tensor=2)\n0: tensor=S(0)\n2.weight: tensor=S(1)",
    "stages": "grid cpu (pipe=2, data=2)\nplace 0 at pipe=0\nplace {1,2} at pipe=1\n4 micro-batches",
    "parts": "grid cpu (data=2)\n**: data=S(0)\n4 micro-batches",
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": sgd,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1),
    "one by one": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, foreach=False, amsgrad=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("made", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_that_steps_by_itself_trains_as_on_one_device(plan: str, made: str) -> None:
    """It accumulates, clips, follows a schedule of rates, and clears gradients through the model or the optimizer."""
    mine, one = net(), net()
    stepping, stepped = OPTIMIZERS[made](mine), OPTIMIZERS[made](one)
    step = flow.compile(mine, loss_fn, stepping, plan=PLANS[plan], leave_gradients=True)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        rates = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
        for at in range(6):
            if model is mine:
                yield step(*batch(at=at))
            else:
                loss = loss_fn(model, *batch(at=at))
                loss.backward()  # type: ignore[no-untyped-call]
                yield loss
            if at % 2:
                yield nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                rates.step()
                (optimizer if at == 3 else model).zero_grad()

    for ours, wanted in zip(loop(mine, stepping), loop(one, stepped), strict=True):
        same(ours, wanted)
        same_grads(mine, one)
        same_model(mine, one)
    assert {id(x) for group in stepping.param_groups for x in group["params"]} == set(map(id, mine.parameters()))


def test_gradients_are_clipped_by_value_and_by_what_the_optimizer_holds() -> None:
    mine, one = net(), net()
    stepping, stepped = sgd(mine), sgd(one)
    step = flow.compile(mine, loss_fn, stepping, plan=PLANS["ZeRO-3"], leave_gradients=True)
    step(*batch())
    loss_fn(one, *batch()).backward()  # type: ignore[no-untyped-call]
    for optimizer in (stepping, stepped):
        nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.01)
        optimizer.step()
    same_model(mine, one)


def test_a_step_that_updates_takes_what_was_left() -> None:
    """Gradients of one loss are left, and another graph of the same optimizer steps by both."""
    mine, one = net(), net()
    stepping, stepped = sgd(mine), sgd(one)
    left = flow.compile(mine, squares, stepping, placement=LINE, leave_gradients=True)
    step = flow.compile(mine, loss_fn, stepping, placement=LINE)
    for at in range(3):
        left(*batch(at=at))
        step(*batch(at=at))
        squares(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        stepped.step()
        stepped.zero_grad()
    same_model(mine, one)


def test_states_are_saved_and_loaded_as_those_of_any_optimizer() -> None:
    mine, one = net(), net()
    stepping, stepped = OPTIMIZERS["AdamW"](mine), OPTIMIZERS["AdamW"](one)
    step = flow.compile(mine, loss_fn, stepping, plan=PLANS["ZeRO-3"], leave_gradients=True)
    for at in range(4):
        if at == 2:
            stepping.load_state_dict(copy.deepcopy(stepped.state_dict()))  # whole, as one device has it
        step(*batch(at=at))
        stepping.step()
        stepping.zero_grad()
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        stepped.step()
        stepped.zero_grad()
    same_model(mine, one)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (lambda model: flow.nn.shard(model, {"*": {"data": S(0)}}, kind="states"), r"rest as \(S\(0\), B\) in float64"),
        (lambda model: flow.nn.cast(model, {"*": "fp32"}, kind="states"), r"rest as \(B, B\) in float32"),
        (lambda model: flow.nn.offload(model, "*"), "rest on the cpu"),
    ],
    ids=["pieces", "masters", "host"],
)
def test_states_that_rest_elsewhere_are_refused(said: Any, why: str) -> None:
    model = net()
    flow.nn.shard(model, {"*": flow.B})
    said(model)
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID, leave_gradients=True)
    with pytest.raises(SbpError, match=rf"leave_gradients=True, and the optimizer's states of 0\.weight {why}"):
        step(*batch())
    assert not isinstance(model[0].weight, flow.GlobalTensor)
    flow.compile(model, loss_fn, sgd(model), placement=GRID)(*batch())  # the fix that it names


@pytest.mark.parametrize(
    "more",
    [
        {"clip_grad_norm": 1.0},
        {"skip_nonfinite": True},
        {"loss_scale": 8.0},
        {"schedule": "pipedream", "micro_batches": 2},
        {"leave_gradients": 1},
    ],
    ids=lambda more: next(iter(more)),
)
def test_what_only_a_step_that_updates_could_do_is_refused(more: dict[str, Any]) -> None:
    model = net()
    with pytest.raises(SbpError, match=next(iter(more))):
        flow.compile(model, loss_fn, sgd(model), **{"placement": LINE, "leave_gradients": True, **more})


def test_weights_in_fp16_are_refused() -> None:
    model = net(torch.float32)
    flow.nn.cast(model, {"*": "fp16"})
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE, leave_gradients=True)
    with pytest.raises(SbpError, match=r"leave_gradients=True and weights in fp16.*\n.*bf16"):
        step(*batch(dtype=torch.float32))
