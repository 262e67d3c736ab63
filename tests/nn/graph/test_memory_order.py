"""Tensors that do not lie row by row, in graphs: segments count on the order that there will be, and copy elsewhere."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.boxing.graph.memory_order import lay, lies
from tests.nn.graph.alike import F64, same, same_grads

ONE = flow.placement("cpu:[0] as (data=1)")
TWO = "grid cpu (data=2)\ninput x <- data=S(0)\n**: data=S(0)\n"
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
WAYS: list[dict[str, Any]] = [{"placement": ONE}, {"plan": TWO}, {"placement": GRID}, {"plan": TWO, "micro_batches": 2}]
STRAIGHT = WAYS[:3]


class Pixels(nn.Module):
    """Attention over pixels, as image models have it: what comes out lies channels last in the shape of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        line = x.flatten(2).transpose(1, 2)
        rows = self.norm(line.transpose(1, 2)).transpose(1, 2)
        q, k, v = (part.unflatten(2, (2, 4)).transpose(1, 2) for part in self.qkv(rows).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        made: Tensor = self.out(seen).transpose(1, 2).reshape(x.shape) + x
        return made


class Turned(nn.Module):
    """A layer after which memory lies in another order, in front of what asks whether it does."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function(x) + self.linear(x)
        return made


def layers(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(*[Turned(function) for _ in range(3)])


def held(model: nn.Module, x: Tensor, **how: Any) -> None:
    """A step is that of one device: its loss and all gradients."""
    torch.manual_seed(0)
    one = copy.deepcopy(model.to(F64))
    step = flow.compile(model, lambda m, x: m(x).square().mean(), **how)
    torch.manual_seed(3)
    loss = step(x)
    torch.manual_seed(3)
    wanted = one(x).square().mean()
    wanted.backward()
    same(loss, wanted)
    same_grads(model, one)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["code", "autograd"])
@pytest.mark.parametrize("how", WAYS, ids=["one", "data", "grid", "micro"])
def test_attention_over_pixels_twice_in_a_row_is_that_of_one_device(how: dict[str, Any], backend: str) -> None:
    held(nn.Sequential(Pixels(), Pixels(), Pixels()), torch.randn(4, 8, 3, 2, dtype=F64), backend=backend, **how)


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: (x.mT.contiguous() * x.sum()).mT,
    "a reshape that copies": lambda x: x.mT.reshape(-1).reshape(x.mT.shape).mT.sin().mT.reshape(x.shape),
    "attention": lambda x: F.scaled_dot_product_attention(x[None].mT, x[None].mT, x[None].mT)[0].mT,
    "a view": lambda x: x.mT.view(x.shape[0], -1).view(x.mT.shape).mT if x.mT.is_contiguous() else x.mT.mT.sin(),
    "rrelu": lambda x: F.rrelu(x.mT, 0.1, 0.4, training=False).mT,
    "rows": lambda x: F.layer_norm(x.mT.contiguous(), x.mT.shape[-1:]).mT,
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("how", STRAIGHT, ids=["one", "data", "grid"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_what_depends_on_the_order_in_memory_is_that_of_one_device(
    name: str, how: dict[str, Any], turned: bool
) -> None:
    x = torch.randn(4, 2, 6, dtype=F64)
    held(layers(TURNS[name]), x.mT.contiguous().mT if turned else x, **how)


@pytest.mark.parametrize("how", STRAIGHT, ids=["one", "data", "grid"])
def test_rrelu_of_a_turned_argument_draws_the_numbers_of_one_device(how: dict[str, Any]) -> None:
    held(layers(lambda x: F.rrelu(x, 0.1, 0.4, training=True)), torch.randn(6, 4, dtype=F64).T, **how)


def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The copies that are made from now on because a tensor lies otherwise."""
    found: list[tuple[Any, ...]] = []

    def counted(x: Tensor, order: Any) -> Tensor:
        if not lies(x, order):
            found.append((tuple(x.shape), x.stride(), order))
        return lay(x, order)

    for module in ("backends", "joint"):
        monkeypatch.setattr(f"sbpflow.nn.graph.compiler.{module}.lay", counted)
    return found


class Masked(nn.Module):
    """A block with a mask that all blocks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + F.scaled_dot_product_attention(self.linear(x), x, x, attn_mask=mask)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Masked() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril().expand(x.shape[0], -1, -1)
        for block in self.blocks:
            x = block(x, mask)
        return x


LAST = torch.channels_last
CONVS = nn.Sequential(*[nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU()) for _ in range(3)])
LAID: dict[str, tuple[nn.Module, Tensor, int]] = {
    "rows": (layers(torch.sin), torch.randn(4, 6, dtype=F64), 0),
    "pixels": (nn.Sequential(*[Pixels() for _ in range(3)]), torch.randn(4, 8, 3, 2, dtype=F64), 1),
    "a mask that is expanded": (Blocks(), torch.randn(4, 3, 6, dtype=F64), 0),
    "channels last": (copy.deepcopy(CONVS), torch.randn(4, 6, 3, 2, dtype=F64).to(memory_format=LAST), 1),
}  # with how many gradients lie otherwise: that of the mean of squares does


@pytest.mark.parametrize("name", LAID)
def test_nothing_is_copied_where_orders_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    model, x, count = LAID[name]
    held(copy.deepcopy(model), x, placement=ONE)
    assert len(made) == count, made


def test_pieces_of_samples_are_not_copied_either(monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies(monkeypatch)
    model, x, _ = LAID["rows"]
    held(copy.deepcopy(model), x, plan=TWO)
    assert made == []
