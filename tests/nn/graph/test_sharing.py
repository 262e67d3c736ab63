"""Graphs that share a model, and what makes another graph of it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.nn.graph.alike import (
    GRID,
    LINE,
    WHERE,
    Noisy,
    batch,
    compiled,
    eager,
    loss_fn,
    net,
    same,
    same_model,
    sgd,
    whole,
)

# Inference, and graphs that share a model


@WHERE
def test_an_inference_graph_is_the_models_forward(where: flow.Placement) -> None:
    model, one = net(), net()
    forward = flow.compile(model, placement=where)
    x, _ = batch()
    with torch.no_grad():
        y = forward(x)
    same(y, one(x))
    assert not y.requires_grad
    assert not forward.planned.plan.trains


def test_under_no_grad_a_training_graph_only_tells_the_loss() -> None:
    model, one = net(), net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    with torch.no_grad():
        same(step(*batch()), loss_fn(one, *batch()))
    same_model(model, one)
    step(*batch())
    eager(one, loss_fn, sgd(one), *batch())
    same_model(model, one)


@WHERE
def test_training_and_evaluation_share_one_model(where: flow.Placement) -> None:
    model, one = Noisy().double(), Noisy().double()
    model.drop.p = one.drop.p = 0.0
    train, evaluate = flow.compile(model, loss_fn, sgd(model), placement=where), flow.compile(model)
    ones = sgd(one)
    for at in range(2):
        x, y = batch(at=at)
        model.train(), one.train()
        same(train(x, y), eager(one, loss_fn, ones, x, y))
        held = dict(model.named_parameters())
        model.eval(), one.eval()
        with torch.no_grad():
            same(evaluate(x), one(x))
        assert all(value is held[name] for name, value in model.named_parameters())
        same_model(model, one)
    assert compiled(train) == compiled(evaluate) == 1


def test_eval_mode_is_another_graph_of_the_same_model() -> None:
    model = Noisy()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        first, second = forward(x), forward(x)
        assert not torch.equal(whole(first), whole(second))  # dropout draws anew
        model.eval()
        assert torch.equal(whole(forward(x)), whole(forward(x)))
        assert compiled(forward) == 2
        model.train()
        forward(x)
        assert compiled(forward) == 2


@WHERE
def test_dropout_draws_what_one_device_draws(where: flow.Placement) -> None:
    model, one = Noisy().double(), Noisy().double()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=where), sgd(one)
    torch.manual_seed(5)
    mine = [step(*batch(at=at)) for at in range(2)]
    torch.manual_seed(5)
    for at in range(2):
        same(mine[at], eager(one, loss_fn, ones, *batch(at=at)))


# What makes another graph


def test_other_shapes_are_captured_once_each() -> None:
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    for rows in (8, 4, 8, 4, 8):
        step(*batch(rows))
    assert compiled(step) == 2

    class Adds(flow.nn.Graph):
        def build(self, x: Tensor, flag: bool) -> Tensor:
            return x + 1 if flag else x - 1

    adds = Adds(placement=LINE)
    for rows, flag in ((2, True), (2, True), (3, True), (2, False), (3, True)):
        assert torch.equal(whole(adds(torch.ones(rows), flag)), torch.ones(rows) + (1 if flag else -1))
    assert compiled(adds) == 3


def test_numbers_of_other_types_are_other_arguments() -> None:
    class Adds(flow.nn.Graph):
        def build(self, x: Tensor, n: Any) -> Tensor:
            return x + n  # type: ignore[no-any-return]

    adds = Adds(placement=LINE)
    x = torch.ones(2, dtype=torch.long)
    assert [adds(x, n).dtype for n in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]


def test_frozen_parameters_stay_and_freezing_is_noticed() -> None:
    model, one = net(), net()
    for each in (model, one):
        each[0].requires_grad_(False)
    step = flow.compile(model, loss_fn, torch.optim.SGD([*model[2].parameters()], lr=0.1), placement=GRID)
    ones = torch.optim.SGD([*one[2].parameters()], lr=0.1)
    same(step(*batch()), eager(one, loss_fn, ones, *batch()))
    same_model(model, one)
    for each in (model, one):
        each[2].bias.requires_grad_(False)
    same(step(*batch(at=1)), eager(one, loss_fn, ones, *batch(at=1)))
    same_model(model, one)
    assert compiled(step) == 2


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.kind = nn.Linear(4, 3), 1.0, "plain"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.scale
        return out.abs() if self.kind == "abs" else out


def test_numbers_that_modules_hold_are_noticed_when_they_change() -> None:
    model = Scaled()
    one = copy.deepcopy(model)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for scale, kind in ((1.0, "plain"), (2.0, "plain"), (2.0, "abs"), (1.0, "plain")):
            model.scale, model.kind = one.scale, one.kind = scale, kind
            same(forward(x), one(x), 1e-6)
    assert compiled(forward) == 3


class Weighted(flow.nn.Graph):
    def __init__(self, weight: float) -> None:
        super().__init__(placement=LINE)
        self.weight, self.calls = weight, 0

    def build(self, x: Tensor) -> Tensor:
        return x * self.weight


def test_numbers_that_the_graph_holds_are_noticed_too_where_they_are_read() -> None:
    graph = Weighted(2.0)
    for weight in (2.0, 3.0, 2.0):
        graph.weight, graph.calls = weight, graph.calls + 1
        assert torch.equal(whole(graph(torch.ones(2))), torch.full((2,), weight))
    assert compiled(graph) == 2


def test_numbers_that_nothing_reads_may_change_freely() -> None:
    model = Scaled()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for step in range(3):
            model.step = step  # type: ignore[assignment]
            forward(x)
    assert compiled(forward) == 1


def test_layers_that_are_alike_are_all_looked_at() -> None:
    model = nn.Sequential(*(Scaled() for _ in range(1)), nn.Linear(3, 4), *(Scaled() for _ in range(1)))
    one = copy.deepcopy(model)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        for scale in (1.0, 2.0):
            model[2].scale = one[2].scale = scale  # type: ignore[assignment]
            same(forward(x), one(x), 1e-6)


def test_dropouts_probability_may_change() -> None:
    model = Noisy()
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        forward(x)
        model.drop.p = 0.0
        assert torch.equal(whole(forward(x)), whole(forward(x)))
