"""DeepSpeed's ZeRO, FSDP and SimpleFSDP: what rests on a rank, and what is sent for it."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.boxing.graph.move_table import moves_of

from ..small import GPT, gpt, loss_fn, same_as_one_device

N = 4
PLANS = {
    "ddp": "grid (data=4)\n",
    "zero1": "grid (data=4)\nstates **: data=S(0)\n",
    "zero2": "grid (data=4)\n{grads,states} **: data=S(0)\n",
    "zero3": "grid (data=4)\n**: data=S(0)\n",
}
MASTERS = "cast ** to bf16\ncast states ** to fp32\n"
PER_NUMBER = {"ddp": 16, "zero1": 4 + 12 / N, "zero2": 2 + 14 / N, "zero3": 16 / N}  # mixed precision with Adam
# Bytes sent, where a sum is a scatter and a gather. ZeRO-1 sums gradients whole here, as they rest; ZeRO-2 does not.
OF_DATA_PARALLEL = {"ddp": 1.0, "zero1": 1.5, "zero2": 1.0, "zero3": 1.5}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_each_trains_as_one_device_does(name: str) -> None:
    same_as_one_device(gpt(), plan=PLANS[name], near=1e-7, optimizer=torch.optim.AdamW)


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_holds_the_papers_bytes_a_number(name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8))
    adam = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, lambda m, x: m(x).float().square().mean(), adam, plan=PLANS[name] + MASTERS)
    step(torch.randn(8, 16).bfloat16())
    numbers = sum(value.numel() for value in model.parameters())
    held = {of.parameters + of.gradients + of.states for of in step.planned.held().values()}
    assert held == {PER_NUMBER[name] * numbers}
    assert {of.parameters + of.states for of in step.memory_at_rest().values()} == {
        PER_NUMBER[name] * numbers - next(iter(step.planned.held().values())).gradients
    }


def large(plan: str, layers: int = 2) -> tuple[Any, int]:
    """A step of a model whose tokens weigh more than its weights, planned, and how many numbers it trains."""
    with torch.device("meta"):
        model = GPT(layers, 512)
        words = torch.zeros(64, 128, dtype=torch.long)
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters()), plan=plan).plan(words, words)
    return step, sum(value.numel() for value in model.parameters())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANS)
def test_gradients_and_weights_send_the_papers_share_of_data_parallelism(name: str) -> None:
    step, numbers = large(PLANS[name])
    sent = sum(row.total * row.count for row in moves_of(step.physical, step.planned.program.again))
    assert sent / (2 * (N - 1) * numbers * 4) == pytest.approx(OF_DATA_PARALLEL[name], rel=0.02)


def test_fsdp_gathers_a_layer_twice_and_scatters_its_gradients_once() -> None:
    text = "expect gathered at once <= 2 layers\nexpect no all_reduce over data a layer\n"
    step, _ = large(PLANS["zero3"] + text, layers=4)
    rows = [row for row in moves_of(step.physical, step.planned.program.again) if ".up.weight" in row.name]
    gathered = [row.direction for row in rows if row.plan.route.startswith("all_gather")]
    assert gathered == ["forward", "again"]
    assert {row.count for row in rows} == {4}
    assert all("reduce_scatter" in row.plan.route for row in rows if row.direction == "backward")


def test_simple_fsdp_sends_small_pieces_together_and_changes_no_number() -> None:
    """Buckets of a pipeline's gathers and of a step's small gradients; held to one device above."""
    step, _ = large(PLANS["zero3"])
    assert any(row.name.endswith("more") for row in moves_of(step.physical))
