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


@pytest.mark.sampled(1)
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


@pytest.mark.parametrize(("keep", "kept"), [("mm", 6), ("every second mm", 5)])
def test_a_kept_op_keeps_its_result_and_not_what_its_backward_reads(keep: str, kept: int) -> None:
    """Widths a layer: what goes in, and results of products. Those of the norm and of gelu are made again."""
    layers, width, rows = 16, 16, 512
    model = nn.Sequential(*(Mlp(width) for _ in range(layers)))
    flow.nn.recompute(list(model.children()), keep=keep)
    step = flow.compile(model, loss_fn, placement=flow.placement("cpu", range(1)))
    found, told = peak(step, model, torch.randn(rows, width))
    unit = rows * width * 4
    assert layers * kept * unit < found < (layers * kept + 16) * unit
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


# What stays of a layer, in s b h bytes of fp16. The paper's 34 has GELU's result (8) and those of both norms (4), which
# are made again here of what stays, and masks of one byte a number, which have two here: 34 - 8 - 4 + 2.
KEPT = {"input of a norm": 2 * 2, "q, k, v": 6, "context": 2, "before GELU": 8, "masks of dropout": 2 * 2}
CORE = 6  # a s / h: of attention's core softmax, its mask and what is dropped, where the paper has 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_of_a_layer_are_those_of_selective_recomputation(ranks: int) -> None:
    """With sequence parallel s b h (24 + 6 a s / h) / t, and 24 / t where attention's core is run again; the paper has
    34 + 5 a s / h, and 34."""
    weights = 12 * WIDTH**2 * 2 / UNIT / ranks  # gradients
    found = {}
    for selective in (False, True):
        (few, told), (many, told_of_many) = (megatron(layers, ranks, selective) for layers in (2, 4))
        measured = (many - few) / 2 / UNIT / ranks
        assert measured == pytest.approx((told_of_many - told) / 2 / UNIT / ranks, rel=0.01)
        found[selective] = measured - weights
    ours = sum(KEPT.values())
    assert ours == 34 - 8 - 4 + 2
    assert found[True] == pytest.approx(ours / ranks, rel=0.01)
    assert found[False] == pytest.approx((ours + CORE * SCORES) / ranks, rel=0.01)
