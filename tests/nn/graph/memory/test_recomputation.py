"""Memory of recomputed layers: as papers say, as it is worked out, and as it is measured."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S

from .test_liveness import Live

WIDTH, HEADS, TOKENS, ROWS = 64, 8, 64, 2
UNIT = TOKENS * ROWS * WIDTH  # s b h
SCORES = HEADS * TOKENS / WIDTH  # a s / h


def peak(step: Any, model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes that a step makes at its peak, on all ranks: measured, and worked out."""
    step(x)
    model.zero_grad()
    with Live() as live:
        step(x)
    held = step.planned.memory().values()
    return int(live.peak), sum(rank.activations + rank.gradients for rank in held)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).float().square().mean()
    return loss


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


@pytest.mark.parametrize("root", [4, 6])
def test_segments_of_sqrt_layers_take_two_sqrt_blocks(root: int) -> None:
    """At most: one segment, and the input of each."""

    def needs(again: bool) -> tuple[int, int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(*(Mlp(16) for _ in range(root))) for _ in range(root)))
        if again:
            flow.nn.recompute(list(model.children()))
        step = flow.compile(model, loss_fn, placement=flow.placement("cpu", range(1)))
        return peak(step, model, torch.randn(64, 32, 16))

    (plain, _), (found, told) = needs(False), needs(True)
    block = plain / root**2
    assert root * block < found < 2 * root * block
    assert found == pytest.approx(told, rel=0.1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.q, self.k, self.v))
        weights = self.drop(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.1, -1))
        context: Tensor = self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))
        return context


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.drop = Attention(), nn.Dropout(0.1)
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return y


def megatron(layers: int, ranks: int, selective: bool) -> tuple[int, int]:
    """Bytes of all ranks of a tensor and sequence parallel model, measured and worked out."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer() for _ in range(layers))).half()
    columns: dict[str, Any] = {f"*.{name}.weight": S(0) for name in ("attention.q", "attention.k", "attention.v", "up")}
    rows: dict[str, Any] = {f"*.{name}.weight": S(1) for name in ("attention.out", "down")}
    flow.nn.shard(model, {**columns, **rows, "*norm*": B})
    for layer in model:
        part = layer.attention
        flow.nn.flow([layer, layer.norm, layer.norm2, part, layer.down], result={"tensor": S(1)})
        flow.nn.flow([part.q, part.k, part.v, layer.up], result={"tensor": S(2)})
        if selective:
            flow.nn.recompute(part, only="attention")
    where = flow.placement(f"cpu:[0-{ranks - 1}] as (tensor={ranks})")
    step = flow.compile(model, loss_fn, placement=where, inputs={"x": {"tensor": S(1)}})
    return peak(step, model, torch.randn(ROWS, TOKENS, WIDTH).half())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_of_a_layer_are_those_of_selective_recomputation(ranks: int) -> None:
    """Of fp16, s b h (34 + 5 a s / h) / t with sequence parallel, and 34 / t where attention's core is run again.

    Below it stay what is made again of little, as GELU's result, at the price of masks that have two bytes a number.
    """
    weights = 12 * WIDTH**2 * 2 / UNIT / ranks  # gradients
    found = {}
    for selective in (False, True):
        (few, told), (many, told_of_many) = (megatron(layers, ranks, selective) for layers in (2, 4))
        measured = (many - few) / 2 / UNIT / ranks
        assert measured == pytest.approx((told_of_many - told) / 2 / UNIT / ranks, rel=0.1)
        found[selective] = measured - weights
    assert 0.6 * 34 / ranks < found[True] < 34 / ranks
    assert found[False] < (34 + 5 * SCORES) / ranks * 1.02
    assert found[False] - found[True] == pytest.approx(6 * SCORES / ranks, rel=0.05)
