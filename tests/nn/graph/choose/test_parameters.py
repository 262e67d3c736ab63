"""What a graph takes: global inputs, modules, optimizers, models on meta; and where these live."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S
from tests.nn.graph.alike import (
    GRID,
    LINE,
    WHERE,
    Noisy,
    batch,
    eager,
    loss_fn,
    net,
    same,
    same_model,
    sgd,
    trains_alike,
)

# Global tensors as inputs


@WHERE
def test_a_global_input_stays_where_it_is(where: flow.Placement) -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=where)
    x, _ = batch()
    given = flow.tensor(x, placement=where, sbp=(S(0), B)[: where.ndim])
    before = [shard.data_ptr() for shard in given._shards]
    with torch.no_grad(), flow.record() as moves:
        out = forward(given)
    same(out, one(x))
    assert [shard.data_ptr() for shard in given._shards] == before
    source = next(s for s in forward.physical.sources if s.kind == "input")
    assert source.value.layout.state == given._layout.state
    assert sum(move.boxing.total for move in moves) == sum(row.total for row in forward.explain().moves)


def test_a_partial_input_is_added_up() -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=LINE)
    parts = [batch(at=at)[0] for at in range(4)]
    given = flow.from_local(parts, placement=LINE, sbp=P)
    with torch.no_grad():
        same(forward(given), one(sum(parts)))


def test_arguments_that_require_grad_get_it() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    x, y = batch()
    mine, ones = x.clone().requires_grad_(), x.clone().requires_grad_()
    there = flow.tensor(x, placement=GRID, sbp=(S(0), B), requires_grad=True)
    for k in range(2):
        wanted = loss_fn(one, ones, y)
        wanted.backward()  # type: ignore[no-untyped-call]
        same(step(there if k else mine, y), wanted)
        optimizer = sgd(one)
        optimizer.step()
        optimizer.zero_grad()
        same((there if k else mine).grad, ones.grad)
        ones.grad = None


# Modules and optimizers


class Both(flow.nn.Graph):
    """Two models, each with its optimizer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(3)
        self.front, self.back = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.one, self.other = sgd(self.front), torch.optim.AdamW(self.back.parameters(), lr=0.01)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.back(self.front(x).relu()), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


@WHERE
def test_two_modules_and_two_optimizers(where: flow.Placement) -> None:
    step, one = Both(placement=where), Both()
    for at in range(3):
        same(step(*batch(at=at)), one.build(*batch(at=at)))
        for optimizer in (one.one, one.other):
            optimizer.step()
            optimizer.zero_grad()
    same_model(step.front, one.front)
    same_model(step.back, one.back)
    names = [s.value.name for s in step.physical.sources if s.kind == "parameter"]
    assert names == ["front.weight", "front.bias", "back.weight", "back.bias"]


class Shared(flow.nn.Graph):
    """Modules in a list, of which two share a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(3)
        self.parts = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), nn.Linear(4, 3).double()]
        self.parts[1].weight = self.parts[0].weight
        values = {id(p): p for part in self.parts for p in part.parameters()}
        self.optimizer = torch.optim.SGD(values.values(), lr=0.1)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        loss = F.cross_entropy(x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


def test_modules_in_a_list_may_share_a_weight() -> None:
    step, one = Shared(placement=LINE), Shared()
    for at in range(2):
        same(step(*batch(at=at)), one.build(*batch(at=at)))
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert step.parts[0].weight is step.parts[1].weight
    for mine, other in zip(step.parts, one.parts, strict=True):
        same_model(mine, other)


class Odd(nn.Module):
    """A tied weight, one that nothing uses, and a module that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.spare, self.idle = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(x)).relu())
        return out


@WHERE
def test_tied_and_unused_parameters(where: flow.Placement) -> None:
    model = Odd().double()
    step = trains_alike(model, where)
    assert model.first.weight is model.second.weight
    assert isinstance(model.spare, flow.GlobalTensor)
    assert model.spare.grad is None
    assert step.planned.plan.trains


def test_unused_parameters_have_no_gradient() -> None:
    model, one = Odd(), Odd()
    step = flow.compile(model, loss_fn, placement=LINE)
    step(*batch(dtype=torch.float32))
    eager(one, loss_fn, None, *batch(dtype=torch.float32))
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in one.parameters()]


@WHERE
def test_buffers_change_as_on_one_device(where: flow.Placement) -> None:
    model = Noisy().double()
    model.drop.p = 0.0
    trains_alike(model, where)
    assert int(model.seen) == 24


@WHERE
def test_the_models_own_parameters_are_global_afterwards(where: flow.Placement) -> None:
    model, one = net(), net()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=where), sgd(one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
        x = batch(at=at)[0]
        with torch.no_grad():  # an eager call in between has the new values
            same(model(flow.tensor(x, placement=where, sbp=(B,) * where.ndim)), one(x))
    assert "placement=cpu:[0-3]" in repr(model[0].bias)
    assert str(step).startswith("Sequential: ")
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    step(*batch())
    model.load_state_dict(saved)
    same_model(model, one)
    same(step(*batch(at=5)), loss_fn(one, *batch(at=5)))


def test_a_whole_state_dict_can_be_loaded_between_steps() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    step(*batch())
    model.load_state_dict(one.state_dict())
    same(step(*batch()), loss_fn(one, *batch()))


def test_eager_training_in_between_goes_on_with_the_same_weights_and_momentum() -> None:
    model, one = net(), net()
    mine, ones = sgd(model), sgd(one)
    step = flow.compile(model, loss_fn, mine, placement=LINE)
    for at in range(4):
        x, y = batch(at=at)
        if at % 2:
            eager(
                model, loss_fn, mine, flow.tensor(x, placement=LINE, sbp=S(0)), flow.tensor(y, placement=LINE, sbp=S(0))
            )
        else:
            step(x, y)
        eager(one, loss_fn, ones, x, y)
    same_model(model, one)


# Where layers live


@pytest.mark.parametrize("nest", [False, True], ids=["side by side", "nested"])
def test_layers_on_several_placements(nest: bool) -> None:
    model = net()
    if nest:
        flow.nn.place(model, LINE)
        flow.nn.place(model[2], flow.placement("cpu", range(2)))
    else:
        flow.nn.place(model[:2], GRID[0])
        flow.nn.place(model[2], GRID[1])
    one = copy.deepcopy(model)
    step, ones = flow.compile(model, loss_fn, sgd(model)), sgd(one)
    for at in range(3):
        same(step(*batch(at=at)), eager(one, loss_fn, ones, *batch(at=at)))
    same_model(model, one)
    assert model[0].weight.placement != model[2].weight.placement


def test_hints_hold() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": {"tensor": S(0)}, "2.weight": {"tensor": S(1)}})
    trains_alike(model, GRID)
    assert model[0].weight.sbp == (B, S(0))
    assert model[2].weight.sbp == (B, S(1))


def test_a_parameter_may_be_addends() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": P})
    trains_alike(model, LINE)
    assert model[0].weight.sbp == (P,)


@WHERE
def test_a_model_on_meta_is_planned_then_made(where: flow.Placement) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    step = flow.compile(model, loss_fn, placement=where)
    step.plan_for(*batch(dtype=torch.float32))
    assert step.text()
    torch.manual_seed(7)
    mine = step(*batch(dtype=torch.float32))  # which draws the values
    torch.manual_seed(7)
    one = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    same(mine, loss_fn(one, *batch(dtype=torch.float32)), 1e-6)
    same_model(model, one, 0)


# Mixtures of experts


class Experts(nn.Module):
    """Tokens in order of their experts, all in one grouped product, as transformers has it by default."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.gate, self.up = nn.Linear(8, 2, bias=False).to(dtype), nn.Parameter(torch.randn(2, 8, 16).to(dtype))
        self.head = nn.Linear(16, 3).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, -x], 1)
        best, expert = self.gate(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = F.one_hot(expert, 2).sum(0).cumsum(0).int()
        mixed = F.grouped_mm(x[order].to(self.up.dtype), self.up, offs=ends)[order.argsort()]
        out: Tensor = self.head((mixed * best[:, None]).tanh())
        return out


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
def test_grouped_products_in_every_dtype(kind: str) -> None:
    """torch refuses fakes of them in anything but bfloat16, though kernels take them."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return loss_fn(model, x, y)

    wide = kind == "bfloat16"
    model = Experts(torch.bfloat16 if wide else torch.float32)
    trains_alike(model, LINE, loss=loss, steps=2, tolerance=1e-6 if kind == "float32" else 2e-2)
