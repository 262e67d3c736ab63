"""Alpa and Galvatron: what the planner finds is as good as what people write, and fits where it has to."""

import pytest
import torch

import sbpflow as flow
from sbpflow.sbp import S

from ..small import GPT, loss_fn

HAND = {  # plans that people write for a GPT on four ranks
    "data parallel": "grid cuda (ranks=4)\ninput * <- ranks=S(0)\n",
    "ZeRO-3": "grid cuda (ranks=4)\n**: ranks=S(0)\n",
    "Megatron": "grid cuda (ranks=4)\nlayers.*.{q,k,v,up}: ranks=S(0)\nlayers.*.{out,down}.weight: ranks=S(1)\n",
}


def meta(width: int, rows: int, length: int) -> tuple[GPT, torch.Tensor]:
    with torch.device("meta"):
        return GPT(2, width), torch.zeros(rows, length, dtype=torch.long)


def test_alpa_finds_megatron_where_weights_dominate_and_never_costs_more_than_a_plan_by_hand() -> None:
    model, words = meta(2048, 2, 32)
    found = flow.find_plan(model, (words, words), plan="grid cuda (ranks=4)", cluster="h100x8", loss_fn=loss_fn)
    seconds = {
        name: flow.Plan.read(text).check(model, (words, words), cluster="h100x8", loss_fn=loss_fn).seconds
        for name, text in HAND.items()
    }
    assert found.checked.seconds <= min(seconds.values()) * (1 + 1e-9)
    step = flow.compile(model, loss_fn, plan=str(found.without_comments())).plan_for(words, words)
    weights = [step.physical.layout(f"layers.1.{name}.weight").sbp for name in ("q", "out", "up", "down")]
    assert weights == [(S(0),), (S(1),), (S(0),), (S(1),)]


@pytest.mark.sweep
def test_galvatrons_answer_fits_the_memory_that_the_free_one_does_not() -> None:
    """By pieces that rest, or layers that run again; all 4,096 plans of 4 layers are in nn/plan/test_exhaustive.py."""
    model, words = meta(512, 16, 64)
    free = flow.find_plan(model, (words, words), plan="grid cuda (ranks=4)", cluster="h100x8", loss_fn=loss_fn)
    limit = 0.7 * free.checked.memory
    tight = flow.find_plan(
        model, (words, words), plan="grid cuda (ranks=4)", cluster="h100x8", loss_fn=loss_fn, memory=limit
    )
    assert tight.checked.memory <= limit < free.checked.memory
    assert tight.checked.seconds >= free.checked.seconds
