"""Weights, gradients and optimizer states rest apart, per axis, and train as on one device."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing.graph.physical import Source
from sbpflow.nn.graph.optimizer.adopted_model import AdoptedModel
from sbpflow.nn.graph.optimizer.at_rest import AtRest
from sbpflow.placement.errors import SbpflowError
from sbpflow.sbp import Sbp
from tests.nn.graph.alike import GRID, eager, same, same_model
from tests.ranks import Ranks

DATA = flow.placement("cpu:[0-3] as (data=4)")
CUT, WHOLE = {"data": S(0)}, {"data": B}
# Where weights, gradients and states lie; None: nothing is said.
RESTS: dict[str, tuple[Any, Any, Any]] = {
    "data parallel": (WHOLE, None, None),
    "ZeRO-1": (WHOLE, None, CUT),
    "ZeRO-2": (WHOLE, CUT, CUT),
    "ZeRO-3": (CUT, None, None),
    "columns": (WHOLE, None, {"data": S(-1)}),
    "gradients alone": (WHOLE, CUT, None),
    "weights alone": (CUT, WHOLE, WHOLE),
    "weights and gradients": (CUT, None, WHOLE),
}
EVERY = pytest.mark.parametrize("rest", RESTS)


def net(*sizes: int) -> nn.Sequential:
    """Layers of sizes that four ranks do not share out evenly; of the last some have nothing."""
    torch.manual_seed(1)
    sizes = sizes or (4, 13, 6, 3)
    layers: list[nn.Module] = []
    for n, m in pairwise(sizes):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def batch(at: int, many: int = 16, out: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    x, y = (torch.randn(many, n, generator=draw, dtype=torch.float64) for n in (4, out))
    return x, y


def said(model: nn.Module, rest: str) -> nn.Module:
    for kind, sbp in zip(("weights", "grads", "states"), RESTS[rest], strict=True):
        if sbp is not None:
            flow.nn.shard(model, {"*": sbp}, kind)  # type: ignore[arg-type]
    return model


def cut(where: flow.Placement, *tensors: Tensor) -> list[Tensor]:
    """Arguments that lie along the data."""
    return [flow.tensor(t, placement=where, sbp={"data": S(0)}) for t in tensors]


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("where", [DATA, GRID], ids=["line", "grid"])
def test_a_step_is_that_of_one_device(rest: str, where: flow.Placement) -> None:
    model, one = said(net(), rest), net()
    mine, ones = (optim.AdamW(each.parameters(), lr=0.1) for each in (model, one))
    step = flow.compile(model, loss_fn, mine, placement=where)
    for at in range(5):
        x, y = batch(at)
        args = cut(where, x, y)
        with flow.record() as moves:
            same(step(*args), eager(one, loss_fn, ones, x, y))
    same_model(model, one)
    sent = sum(move.boxing.total for move in moves if move.op != "same values")
    assert sent == sum(row.total * row.count for row in step.explain().moves) > 0
    for source in step.physical.sources:
        if source.kind == "parameter" and source.value.layout.shape[0] > 1:
            lies = (source.value.layout, source.home, source.master)
            assert [str(of.sbp[0]) for of in lies] == [str(_on(source, sbp)) for sbp in _resting(rest)]


def _resting(rest: str) -> list[Any]:
    weights, grads, states = RESTS[rest]
    states = states or weights
    return [weights, grads or (states if weights is WHOLE else weights), states]


def _on(source: Source, sbp: dict[str, Sbp]) -> Sbp:
    entry = sbp["data"]
    return S(len(source.value.layout.shape) - 1) if entry == S(-1) else entry


# Bytes at rest


def seen(monkeypatch: pytest.MonkeyPatch, where: flow.Placement) -> dict[int, int]:
    """Bytes of gradients by rank, as each step's come to the update."""
    found: dict[int, int] = {}
    update = AdoptedModel.update

    def watched(self: AdoptedModel, grads: Any) -> None:
        for at, rank in enumerate(where.flat):
            mine = [g[at] for g in grads.values()]
            found[rank] = sum(g.nbytes for g in mine)
            memory = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in mine}
            assert sum(memory.values()) <= found[rank] + 8 * len(mine)  # no views of more than the padding of a row
        update(self, grads)

    monkeypatch.setattr(AdoptedModel, "update", watched)
    return found


@pytest.mark.sampled(2)
@EVERY
@pytest.mark.parametrize("where", [DATA, GRID], ids=["line", "grid"])
def test_what_ranks_hold_is_what_the_plan_says(rest: str, where: flow.Placement, monkeypatch: Any) -> None:
    model = said(net().float(), rest)
    gradients = seen(monkeypatch, where)
    step = flow.compile(model, loss_fn, optim.Adam(model.parameters()), placement=where)
    for at in range(2):
        step(*cut(where, *(t.float() for t in batch(at))))
    memory = step.explain().memory
    assert memory is not None
    for rank, held in step.memory_at_rest().items():
        plan = memory.ranks[rank]
        assert (held.parameters, held.gradients, held.states) == (plan.parameters, 0, plan.states)
        assert gradients[rank] == plan.gradients


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rest", ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
@pytest.mark.parametrize("sizes", [(4, 8, 4), (4, 13, 6, 3)], ids=["even", "uneven"])
def test_adam_in_float32_takes_so_many_bytes_a_parameter(rest: str, sizes: tuple[int, ...]) -> None:
    """Weights 4, gradients 4, states 8, each whole or a rank's share of the rows; shares are not all alike."""
    model = said(net(*sizes).float(), rest)
    step = flow.compile(model, loss_fn, optim.Adam(model.parameters()), placement=DATA)
    many = sum(p.numel() for p in model.parameters())
    x, y = batch(0, out=sizes[-1])
    step(*cut(DATA, x.float(), y.float()))
    memory = step.explain().memory
    assert memory is not None
    share = [sum(rows(p, i).numel() for p in net(*sizes).parameters()) for i in range(4)]
    assert sum(share) == many
    weights, grads, states = ([many] * 4 if cut is WHOLE else share for cut in _resting(rest))
    for i, held in step.memory_at_rest().items():
        assert held.parameters == 4 * weights[i]
        assert memory.ranks[i].gradients == 4 * grads[i]
        assert held.states == 8 * states[i]


def rows(p: Tensor, i: int) -> Tensor:
    """The first ranks have one row more."""
    return p.tensor_split(4)[i]


def test_gradients_without_an_optimizer_are_left_as_they_are_said() -> None:
    model, one = said(net(), "ZeRO-2"), net()
    step = flow.compile(model, loss_fn, placement=DATA)
    for at in range(2):  # added up
        step(*cut(DATA, *batch(at)))
        loss_fn(one, *batch(at)).backward()  # type: ignore[no-untyped-call]
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        same(p.grad, q.grad)
        assert isinstance(p.grad, flow.GlobalTensor)
        assert p.grad.sbp == (S(0),)
    held = step.memory_at_rest()
    assert {i: of.gradients for i, of in held.items()} == {
        i: 8 * sum(rows(p, i).numel() for p in one.parameters()) for i in range(4)
    }


MAKES: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}


def trained(rest: str, name: str) -> tuple[list[Tensor], dict[int, AtRest], list[int]]:
    """The weights after five steps on real ranks, what this one holds, and what the plan says of its states."""
    model = said(net(), rest)
    mine = MAKES[name](model.parameters())
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    for at in range(5):
        step(*cut(DATA, *batch(at)))
    memory = step.explain().memory
    assert memory is not None
    held = step.memory_at_rest()
    weights = [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return weights, held, [memory.ranks[rank].states for rank in held]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MAKES)
def test_real_ranks_train_as_one_device(ranks4: Ranks, name: str) -> None:
    """Of three rows one of four ranks has none."""
    one = net()
    ones = MAKES[name](one.parameters())
    for at in range(5):
        eager(one, loss_fn, ones, *batch(at))
    for rest in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        for rank, (weights, held, states) in enumerate(ranks4(trained, rest, name)):
            for p, q in zip(weights, one.parameters(), strict=True):
                same(p, q)
            assert list(held) == [rank]
            assert name == "Adafactor" or [held[rank].states] == states


# Of some parameters, and of some axes


def alike(model: nn.Module, one: nn.Module, where: flow.Placement, **options: Any) -> flow.nn.Graph:
    """A step of a model that trains as one on one device, where both train what requires grad."""
    mine, ones = (optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, one))
    step = flow.compile(model, loss_fn, mine, placement=where, **options)
    for at in range(3):
        same(step(*cut(where, *batch(at))), eager(one, loss_fn, ones, *batch(at)))
    same_model(model, one)
    return step


def lies(step: flow.nn.Graph, name: str) -> list[str]:
    source = next(s for s in step.physical.sources if s.value.name == name)
    return [str(of.sbp) for of in (source.value.layout, source.home, source.master)]


def test_axes_that_are_not_named_are_as_the_weights() -> None:
    """Pieces lie inside of what a rank has of the weight, so that nothing but a part of it is gathered."""
    model = net(4, 16, 3)
    flow.nn.shard(model, {"*": B, "0.weight": None, "0.bias": None})
    flow.nn.shard(model, {"0": {"tensor": S(0)}})
    flow.nn.shard(model, {"*": {"data": S(0)}}, kind="states")
    step = alike(model, net(4, 16, 3), GRID)
    assert lies(step, "0.weight") == ["(B, S(0))", "(S(0), S(0))", "(S(0), S(0))"]
    sent = {row.name: row for row in step.explain().moves if row.direction == "update" and row.total}
    update = sent["0.weight and 1 more"]
    assert update.route == "all_gather over data"
    assert update.total == 4 * (4 * 4 + 4) * 8  # each of four ranks gets the other half of its 8 x 4 and 8 numbers


def test_frozen_and_tied_parameters() -> None:
    def made() -> nn.Sequential:
        model = net(4, 4, 4, 3)
        model[2].weight = model[0].weight
        model[4].weight.requires_grad_(False)
        return model

    model = made()
    flow.nn.shard(model, {"*": B})
    flow.nn.shard(model, {"2.weight": CUT, "4": CUT}, kind=("grads", "states"))  # one tied, one frozen
    step = alike(model, made(), DATA)
    assert lies(step, "0.weight") == ["(B,)", "(S(0),)", "(S(0),)"]
    assert lies(step, "4.weight") == ["(B,)", "(B,)", "(B,)"]
    assert lies(step, "4.bias") == ["(B,)", "(S(0),)", "(S(0),)"]


def test_an_axis_may_be_left_to_be_chosen() -> None:
    model = net(4, 16, 8, 3)
    flow.nn.shard(model, {"*": {"data": None, "tensor": B}})
    flow.nn.shard(model, {"0.weight": {"data": None}}, kind="states")
    step = alike(model, net(4, 16, 8, 3), GRID)
    for source in step.physical.sources:
        if source.kind == "parameter":
            assert source.value.layout.sbp[1] is B


def test_a_limit_chooses_what_is_not_said() -> None:
    """Weights and the states of the largest are said to be whole; its gradient, and all of others, may be cut."""
    model = said(net(4, 64, 64, 4), "data parallel")
    flow.nn.shard(model, {"2.weight": WHOLE}, kind="states")
    whole = 8 * sum(p.numel() for p in model.parameters())
    limit = 160_000
    assert limit < 5 * whole  # parameters, gradients, two moments, and their roots in the step
    step = flow.compile(model, loss_fn, optim.AdamW(model.parameters()), placement=DATA, memory=limit)
    step.plan_for(*cut(DATA, *batch(0, out=4)))
    assert lies(step, "2.weight")[::2] == ["(B,)", "(B,)"]
    assert any("S" in at for name in ("0.weight", "2.weight") for at in lies(step, name)[1:])


def test_a_step_is_planned_anew_when_something_else_is_said() -> None:
    model = said(net(), "data parallel")
    step = flow.compile(model, loss_fn, optim.AdamW(model.parameters()), placement=DATA)
    assert lies(step.plan_for(*cut(DATA, *batch(0))), "0.weight")[2] == "(B,)"
    flow.nn.shard(model, {"0.weight": S(0)}, kind="states")
    assert lies(step.plan_for(*cut(DATA, *batch(0))), "0.weight")[2] == "(S(0),)"


def test_an_axis_that_there_is_not() -> None:
    model = said(net(), "data parallel")
    flow.nn.shard(model, {"0": {"rows": S(0)}}, kind="states")
    step = flow.compile(model, loss_fn, optim.AdamW(model.parameters()), placement=DATA)
    with pytest.raises(
        SbpflowError, match=r"states of 0.weight \(13, 4\) is to be {'rows': S\(0\)}(.*\n)*.*kind=\"states\""
    ):
        step.plan_for(*batch(0))
