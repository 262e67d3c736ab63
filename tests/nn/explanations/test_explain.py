"""explain says beforehand what a call will do: the same choice, the same bytes, the same layouts; and does nothing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn import CallReport
from sbpflow.nn.eager.dispatch import forget
from sbpflow.sbp import registry

F = nn.functional
LINE = flow.placement("cpu", range(2))
GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))


def filled(*shape: int, sbp: Any = "S(0)", p: flow.Placement = LINE) -> flow.GlobalTensor:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 7 - 1
    if sbp is P:
        return flow.from_local([whole / 2] * p.size, placement=p, sbp=P)
    return flow.tensor(whole, placement=p, sbp=sbp)


def labels(sbp: Any) -> flow.GlobalTensor:
    return flow.tensor([0, 5, 2, 3], placement=LINE, sbp=sbp)


def attention(x: Tensor) -> Tensor:
    q, k, v = x.chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v) * x.shape[0]


def by_hand(x: Any) -> Tensor:
    y: Tensor = x.to_global(sbp=S(1)).relu()
    y += 1
    return y.float().transpose(0, 1)[:3]


CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "matmul": (torch.matmul, (filled(4, 8, sbp=S(1)), filled(8, 6, sbp=S(0)))),
    "matmul, a move": (torch.matmul, (filled(4, 8, sbp=S(0)), filled(8, 6, sbp=S(0)))),
    "add of P": (torch.add, (filled(4, 8, sbp=P), filled(4, 8, sbp=S(1)))),
    "relu of P": (torch.relu, (filled(5, 3, sbp=P),)),
    "plain tensor": (torch.mul, (filled(4, 3, sbp=S(0)), torch.arange(3.0))),
    "reflected": (torch.rsub, (filled(4, 3, sbp=P), 2.0)),
    "cat": (lambda x, y: torch.cat([x, y]), (filled(4, 3, sbp=S(0)), filled(2, 3, sbp=S(1)))),
    "split softmax": (torch.softmax, (filled(4, 6, sbp=S(1)), -1)),
    "split classes": (F.cross_entropy, (filled(4, 6, sbp=S(1)), labels(B))),
    "split batch": (F.cross_entropy, (filled(4, 6, sbp=S(0)), labels(S(0)))),
    "dropout": (F.dropout, (filled(4, 6, sbp=S(1)),)),
    "rand_like": (torch.rand_like, (filled(4, 6, sbp=S(1)),)),
    "gathered": (torch.linalg.svd, (filled(4, 6, sbp=S(1)),)),
    "gathered, and on": (lambda x: torch.linalg.svd(x)[1] + 1, (filled(4, 6, sbp=S(1)),)),
    "attention": (attention, (filled(2, 4, 12, sbp=S(0)),)),
    "by hand": (by_hand, (filled(4, 4, sbp=S(0)),)),
    "a cast of addends of a gradient": (
        lambda w, x: w.to(torch.float32).mul(x).sum(),
        (flow.ones(3, placement=LINE, sbp=B, dtype=torch.bfloat16).requires_grad_(), filled(4, 3)),
    ),
    "a product of two dtypes": (
        lambda w, x: (w * x).sum(),
        (flow.ones(3, placement=LINE, sbp=B, dtype=torch.bfloat16).requires_grad_(), filled(4, 3)),
    ),
    "two axes": (torch.matmul, (filled(4, 8, sbp=(S(0), B), p=GRID), filled(8, 6, sbp=(B, S(1)), p=GRID))),
}


def lies(value: Any) -> list[Any]:
    found = value if isinstance(value, tuple) else (value,)
    return [x.layout_.state for x in found]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_explained_is_what_happens(name: str) -> None:
    func, args = CALLS[name]
    with flow.record() as before:
        said = flow.explain(func, *args)
    with flow.record() as moves:
        result = func(*args)
    routes = [way.route for step in said.steps if step.chosen for _, way in step.chosen.moves if way.bytes]
    assert (said.ends, list(before)) == ("", [])
    assert (said.bytes, routes) == (moves.bytes, [move.route for move in moves if move.bytes])
    last = said.steps[-1].chosen
    assert last is None or [of.state for of in last.outputs] == lies(result)


@pytest.mark.parametrize("name", CALLS)
def test_the_choice_costs_least_within_a_percent(name: str) -> None:
    func, args = CALLS[name]
    for step in flow.explain(func, *args).steps:
        if step.chosen is not None and step.how == "rule":
            assert step.chosen.seconds <= 1.01 * min(choice.seconds for choice in step.choices)


def test_a_module_is_explained_with_its_parameters_and_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Linear(12, 4), nn.Dropout(0.3))
    flow.nn.to_global(model, GRID, {"0.*": {"tensor": S(0)}, "3.weight": {"tensor": S(1)}})
    x = filled(6, 8, sbp=(S(0), B), p=GRID)
    before = {name: value.detach().full_tensor() for name, value in model.state_dict().items()}
    said = flow.explain(model, x)
    after = {name: value.detach().full_tensor() for name, value in model.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before)
    with flow.record() as moves:
        model(x)
    assert said.bytes == moves.bytes > 0


def test_the_gradients_moves_are_those_of_backward() -> None:
    x, w = filled(4, 10, sbp=S(0)).requires_grad_(), filled(10, 6, sbp=S(0)).requires_grad_()
    said = flow.explain(torch.matmul, x, w)
    y = torch.matmul(x, w)
    with flow.record() as moves:
        y.backward(torch.ones(4, 6))  # type: ignore[no-untyped-call]
    assert said.bytes_back == moves.bytes > 0


def test_nothing_changes_by_an_explanation() -> None:
    x = filled(4, 6, sbp=S(1))
    torch.manual_seed(5)
    flow.explain(lambda x: F.dropout(x.add_(1)).uniform_(), x)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(x.full_tensor(), filled(4, 6).full_tensor())


def test_what_depends_on_data_ends_it() -> None:
    said = flow.explain(lambda x: torch.nonzero(x).sum(), filled(4, 6))
    assert [(step.op, step.how, step.why) for step in said.steps] == [
        ("nonzero", "gathered", "its shape depends on data")
    ]
    assert "nonzero" in said.ends
    assert said.ends in str(said)


def test_a_question_for_a_value_ends_it() -> None:
    said = flow.explain(lambda x: x * 2 if x.sum() > 0 else x, filled(4, 6))
    assert [step.op for step in said.steps] == ["sum", "gt.Scalar"]
    assert said.ends


def test_a_formula_shows_what_it_is_made_of() -> None:
    said = flow.explain(torch.softmax, filled(4, 6, sbp=S(1)), -1)
    assert (said.steps[0].how, said.steps[0].level) == ("formula", 0)
    assert {step.level for step in said.steps[1:]} == {1}
    assert "amax" in [step.op for step in said.steps]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("explained", "FRAGMENT") as made:
        made.define("scale(Tensor x, Tensor[] ws, Tensor? y=None) -> Tensor")
        made.impl("scale", lambda x, ws, y=None: x * ws[0] * ws[1], "CompositeExplicitAutograd")
        made.impl("scale", lambda x, ws, y=None: torch.empty_like(x), "Meta")
        yield made
        registry.known().pop("explained::scale", None)
        forget()


def test_an_op_without_a_rule_gets_the_line_that_serves(library: torch.library.Library) -> None:
    op, x, w = torch.ops.explained.scale, filled(4, 6, sbp=S(0)), filled(6, sbp=B)
    (step,) = flow.explain(op, x, [w, w]).steps
    assert (step.op, step.how, step.why) == ("explained::scale", "gathered", "no rule")
    assert step.rule == 'flow.rule("explained::scale", "a b, {b}, _ -> a b")'
    exec(step.rule, {"flow": flow})
    numbers = [torch.randint(9, shape) for shape in ((4, 6), (6,), (6,))]
    assert not flow.check_rule(op.default, numbers[0], numbers[1:]).wrong
    (served,) = flow.explain(op, x, [w, w]).steps
    assert (served.how, str(served.chosen)) == ("rule", "S(0), B, B -> S(0)")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_a_custom_function_is_explained_too() -> None:
    def run(x: Tensor) -> Tensor:
        return Doubled.apply(x) + 1  # type: ignore[no-any-return, no-untyped-call]

    said = flow.explain(run, filled(4, 6, sbp=S(0)))
    with flow.record() as moves:
        run(filled(4, 6, sbp=S(0)))
    assert [step.how for step in said.steps] == ["gathered", "rule"]
    assert said.bytes == moves.bytes > 0


def test_without_global_tensors_there_is_nothing_to_explain() -> None:
    with pytest.raises(flow.SbpflowError, match="found none"):
        flow.explain(torch.relu, torch.ones(2))


def test_gradients_are_not_explained_but_nothing_runs() -> None:
    x = filled(4, 6).requires_grad_()
    said: CallReport = flow.explain(lambda x: torch.autograd.grad(x.sum(), x), x)
    assert "grad is not explained" in said.ends
    assert x.grad is None


def test_it_prints_the_ways_and_marks_the_choice() -> None:
    assert str(flow.explain(torch.matmul, filled(4, 8, sbp=S(1)), filled(8, 6, sbp=B))).splitlines()[:2] == [
        "matmul of (4, 8) S(1), (8, 6) B on cpu:[0-1]",
        "  * S(1), S(0) -> P   0 us  0 bytes",
    ]
