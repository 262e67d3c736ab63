"""TorchTitan: four axes in one plan, and a checkpoint of one grid that goes on on another."""

from pathlib import Path

import pytest
import torch

import sbpflow as flow

from ..small import batches, gpt, loss_fn, same_as_one_device

FOUR = """
grid (pipe=2, data=2, context=2, tensor=2)
input * <- data=S(0), context=S(1)
pipe layers over pipe by 1f1b, 2 micro-batches
layers.*.{q,k,v,up}: tensor=S(0)
layers.*.{out,down}.weight: tensor=S(1)
{grads,states} **: data=S(0)
inside layers.* use ring over context
"""
OTHER = "grid (data=4)\n**: data=S(0)\n"


@pytest.mark.sweep
def test_four_axes_train_as_one_device_does() -> None:
    same_as_one_device(gpt(), plan=FOUR, given=batches(2), near=1e-7)


def test_what_one_grid_saves_another_loads_to_the_bit(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, loss_fn, optimizer, plan=FOUR)
    step(*batches(1)[0])
    flow.save(tmp_path / "saved", model, optimizer=optimizer)
    fresh = gpt()
    other = torch.optim.AdamW(fresh.parameters())
    again = flow.compile(fresh, loss_fn, other, plan=OTHER)
    flow.load(tmp_path / "saved", fresh, optimizer=other)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, flow.GlobalTensor) else mine
        assert torch.equal(whole, theirs.full_tensor())  # type: ignore[attr-defined]
    again(*batches(1)[0])
