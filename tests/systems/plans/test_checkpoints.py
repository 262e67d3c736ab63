"""TorchTitan: four axes in one plan, products of 8 bits, and a checkpoint of one grid that goes on on another."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow

from ..small import GPT, HEADS, WIDTH, batches, gpt, loss_fn, same_as_one_device

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


class LlamaBlock(nn.Module):
    """Rotated heads, three products for the wide part, norms without a mean, and no biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        made: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return made


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turn = torch.arange(x.shape[2])[:, None] * 0.01 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()], -1)


def llama_losses(plan: str) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    model.layers, model.norm = nn.ModuleList(LlamaBlock() for _ in range(2)), nn.RMSNorm(WIDTH)  # type: ignore[assignment]
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.5), plan=plan)
    losses = [step(*batch).item() for batch in batches(2)]
    eights = sum("product_of_8_bits" in str(op) for op in step.planned.plan.logical.ops)
    assert eights == (2 * 7 if "fp8" in plan else 0)
    return losses


def test_a_llama_trains_in_8_bits_on_four_axes_nearly_as_on_one_device() -> None:
    """Data parallel in pieces, tensor, context and pipeline. Pieces have scales of their own, so rounding differs."""
    one, fp8 = "grid (one=1)\n", "cast layers.* to fp8\n"
    exact, alone = llama_losses(one), llama_losses(one + fp8)
    found = llama_losses(FOUR.replace("{grads,states} **", "**").replace("up}", "gate,up}") + fp8)
    assert found != alone != exact
    assert found == pytest.approx(alone, rel=1e-3)


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
