"""Factories with a placement, and `to_global`, in what a graph captures."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import PlacementError, SbpError
from tests.nn.graph.alike import GRID, LINE, batch, net, same, sgd


class Built(flow.nn.Graph):
    """A graph of one function."""

    def __init__(self, function: Callable[..., Any], placement: flow.Placement | None = None) -> None:
        super().__init__(placement=placement)
        self.function = function

    def build(self, *args: Any) -> Any:
        return self.function(*args)


FACTORIES: dict[str, Callable[..., flow.GlobalTensor]] = {
    "ones": lambda **at: flow.ones(8, 6, **at),
    "zeros of its own dtype": lambda **at: flow.zeros(8, 6, dtype=torch.float8_e5m2, **at),
    "full": lambda **at: flow.full((8, 6), 3, **at),
    "eye": lambda **at: flow.eye(8, 6, **at),
    "rand": lambda **at: flow.rand(8, 6, **at),
    "randn of a seed": lambda **at: flow.randn(8, 6, seed=3, **at),
    "randint": lambda **at: flow.randint(0, 5, (8, 6), **at),
    "tensor": lambda **at: flow.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], **at),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_in_build(name: str) -> None:
    """Without a placement of the graph's own; uneven pieces too."""
    for where, sbp in ((LINE, S(0)), (LINE, B), (GRID, (S(0), S(1))), (GRID, (S(0), S(0)))):
        torch.manual_seed(0)
        made = Built(lambda at=(where, sbp): FACTORIES[name](placement=at[0], sbp=at[1]))()
        torch.manual_seed(0)
        wanted = FACTORIES[name](placement=where, sbp=sbp)
        assert (made.placement, made.sbp, made.dtype) == (wanted.placement, wanted.sbp, wanted.dtype)
        assert torch.equal(made.full_tensor(), wanted.full_tensor())


def test_a_factory_that_is_the_first_of_its_dtype_leaves_no_tensor_without_values() -> None:
    """The shells of global tensors are kept; one that was made while a graph was captured failed ever after."""
    with pytest.raises(SbpError, match="from_local"):
        Built(lambda: flow.from_local([torch.ones(2).char()] * 4, placement=LINE, sbp=S(0)), LINE)()
    Built(lambda: flow.ones(8, dtype=torch.uint8, placement=LINE, sbp=S(0)))()
    assert (flow.ones(8, dtype=torch.uint8, placement=LINE, sbp=S(0)) + 1).sum().item() == 16


def test_numbers_are_drawn_at_each_step() -> None:
    graph = Built(lambda x: x + flow.rand(8, placement=LINE, sbp=S(0)), LINE)
    x = torch.arange(8.0)
    torch.manual_seed(0)
    found = [graph(x).full_tensor() for _ in range(2)]
    torch.manual_seed(0)
    assert all(torch.equal(y, x + torch.rand(8)) for y in found)


def test_addends_are_the_value() -> None:
    made = Built(lambda: flow.ones(8, placement=LINE, sbp=P))()
    assert torch.equal(made.full_tensor(), torch.ones(8))


@pytest.mark.parametrize("sbp", [P, P("max"), P("min"), (S(0), P), (P, S(1))], ids=str)
def test_a_result_that_is_to_be_addends_is(sbp: Any) -> None:
    """It came back as S(0)."""
    x, where = torch.arange(12.0).reshape(4, 3), GRID if isinstance(sbp, tuple) else LINE
    graph = Built(lambda x: ((y := (x * 2).to_global(sbp=sbp)), y + 1), where)
    made, more = graph(x)
    assert made.sbp == (sbp if isinstance(sbp, tuple) else (sbp,))
    assert torch.equal(made.full_tensor(), 2 * x)
    assert torch.equal(more.full_tensor(), 2 * x + 1)


@pytest.mark.parametrize("sbp", [P, P("max")], ids=str)
def test_addends_of_micro_batches_are_joined_as_such(sbp: Any) -> None:
    model, (x, _) = net(), batch()
    alone = copy.deepcopy(model)
    step: Any = flow.compile(model, lambda model, x: model(x).to_global(sbp=sbp), placement=LINE, micro_batches=2)
    with torch.no_grad():
        made = step(x)
        assert made.sbp == (sbp,)
        torch.testing.assert_close(made.full_tensor(), alone(x))


@pytest.mark.parametrize("sbp", [P, P("max")], ids=str)
def test_gradients_go_through_addends(sbp: Any) -> None:
    model, (x, _) = net(), batch()
    alone = copy.deepcopy(model)
    step: Any = flow.compile(model, lambda model, x: model(x).to_global(sbp=sbp).square().sum(), placement=LINE)
    want = alone(x).square().sum()
    want.backward()
    same(step(x), want)
    pairs: list[tuple[Any, Any]] = list(zip(model.parameters(), alone.parameters(), strict=True))
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad)


def test_a_factory_of_addends_is_added_up_once() -> None:
    made, more = Built(lambda x: ((y := flow.ones(8, placement=LINE, sbp=P)), x + y))(torch.ones(8))
    assert made.sbp == (P,)
    assert torch.equal(made.full_tensor(), torch.ones(8))
    assert torch.equal(more.full_tensor(), torch.full((8,), 2.0))


@pytest.mark.parametrize("given", [lambda x, y: (x, y), lambda x, y: (x, torch.ones(3, 2))], ids=["all", "one"])
def test_a_graph_of_global_arguments_lives_where_they_do(given: Any) -> None:
    """It had no placement."""
    x, y = flow.ones(4, 3, placement=LINE, sbp=S(0)), flow.ones(3, 2, placement=LINE, sbp=B)
    made = Built(torch.matmul)(*given(x, y))
    assert made.placement == LINE
    assert torch.equal(made.full_tensor(), torch.full((4, 2), 3.0))


def test_a_graph_of_arguments_on_two_placements_is_told_where_to_say_one() -> None:
    x, y = flow.ones(4, 3, placement=LINE, sbp=S(0)), flow.ones(3, 2, placement=GRID, sbp=B)
    with pytest.raises(
        PlacementError, match=r"no placement, and matmul at .*test_declared.py:\d+ none.*\n.*placement="
    ):
        Built(lambda x, y: torch.matmul(x, y))(x, y)
    assert Built(lambda x, y: torch.matmul(x, y), LINE)(x, y).placement == LINE


def test_what_build_says_of_a_tensor_holds() -> None:
    def step(model: Any, x: Tensor, y: Tensor) -> Any:
        hidden: Any = model[0](x)
        return torch.nn.functional.cross_entropy(model[2](hidden.to_global(sbp=S(1)).tanh()), y)

    model, one = net(), net()
    graph = flow.compile(model, step, sgd(model), placement=LINE)
    wanted = torch.nn.functional.cross_entropy(one(batch()[0]), batch()[1])
    same(graph(*batch()), wanted)
    (op,) = [op for op in graph.planned.plan.decided.logical.ops if op.lies is not None]
    assert graph.planned.graph.layout(graph.planned.plan.decided.names[op.numbers[0]]).sbp == (S(1),)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            lambda x: flow.from_local([x] * 4, placement=LINE, sbp=S(0)),
            "from_local at .*test_declared.py:.*whole there.*flow.tensor",
        ),
        (lambda x: x + flow.rand(8, placement=LINE, sbp=B, generator=torch.Generator()), "generator= at .*once.*seed="),
        (lambda x: x.to_global(sbp=B, grad_sbp=P), "to_global at .* has grad_sbp=.*leave it out"),
        (lambda x: x.to_global(sbp=S(3)), "S\\(3\\)"),
    ],
)
def test_what_cannot_be_said_in_build(body: Callable[..., Any], said: str) -> None:
    with pytest.raises(flow.SbpflowError, match=f"(?s){said}"):
        Built(body, LINE)(torch.ones(8))
