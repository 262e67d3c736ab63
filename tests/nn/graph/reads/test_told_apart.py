"""A step goes by what its arguments and its model's settings are: 1, 1.0 and True are three, 0.0 and -0.0 two."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.nn.graph.reads.recaptures import SHAPES

P = flow.placement("cpu", range(2))
X = torch.ones(2, 3)
# Numbers that are alike to Python, each beside another that the one before might be taken for.
NUMBERS = [1, True, 1.0, 1, 0.0, -0.0, 0, False, -0.0, float("nan"), float("nan"), 0.0]


def shown(number: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The traits of a number that a program can see: its type, and its sign."""
    kind = [int, float, bool].index(type(number))
    return x + kind, 1 / torch.full((), float(number))


PUT: dict[str, Callable[[Any], Any]] = {
    "a number": lambda n: n,
    "in a list": lambda n: [[n]],
    "in a tuple": lambda n: (n,),
    "in a dict": lambda n: {"a": n},
    "the key of a dict": lambda n: {n: "a"},
    "in a frozenset": lambda n: frozenset([n]),
}


def first(value: Any) -> Any:
    """The number in it."""
    if isinstance(value, bool | int | float):
        return value
    return first(value["a"] if isinstance(value, dict) and "a" in value else next(iter(value)))


class Settled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.setting: Any = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return shown(first(self.setting), x)


def alike(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.full_tensor(), other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*for the 4th time")
@pytest.mark.parametrize("put", PUT.values(), ids=list(PUT))
def test_arguments_that_are_equal_and_not_the_same_have_plans_of_their_own(put: Callable[[Any], Any]) -> None:
    step = flow.compile(nn.Identity(), lambda model, x, n: shown(first(n), model(x)), placement=P)
    with torch.no_grad():
        for number in NUMBERS:
            alike(step(X, put(number)), shown(number, X))


@pytest.mark.filterwarnings("ignore:.*for the 4th time")
@pytest.mark.parametrize("put", PUT.values(), ids=list(PUT))
def test_settings_that_are_equal_and_not_the_same_are_noticed(put: Callable[[Any], Any]) -> None:
    model = Settled()
    step = flow.compile(model, placement=P)
    for number in NUMBERS:
        model.setting = put(number)
        alike(step(X), model(X))


def test_the_key_of_a_dict_that_becomes_an_equal_one_is_noticed() -> None:
    model = Settled()
    held: dict[Any, str] = {1: "a"}
    model.setting = held
    step = flow.compile(model, placement=P)
    for number in (1, True, 1.0):
        held.clear()
        held[number] = "a"
        alike(step(X), model(X))


def test_nan_among_arguments_is_planned_once() -> None:
    step = flow.compile(nn.Identity(), lambda model, x, n: model(x) * n, placement=P)
    with torch.no_grad():
        plans = [(step(X, float("nan")), step.planned)[1] for _ in range(5)]
    assert all(one is other for one, other in pairwise(plans))


def test_layers_are_not_alike_where_a_zero_has_another_sign() -> None:
    layers = nn.ModuleList(Settled() for _ in range(4))
    for layer, sign in zip(layers, (0.0, 0.0, -0.0, -0.0), strict=True):
        vars(layer)["setting"] = sign
    step = flow.compile(layers, lambda layers, x: [layer(x)[1] for layer in layers], placement=P)
    with torch.no_grad():
        alike(step(X), [layer(X)[1] for layer in layers])


def test_an_eager_call_is_not_that_of_the_other_zero() -> None:
    x = flow.tensor(X, placement=P, sbp=S(0))
    for value in (0.0, -0.0, 0.0):
        padded = torch.nn.functional.pad(x, (1, 1), value=value)
        alike([1 / padded], [1 / torch.nn.functional.pad(X, (1, 1), value=value)])


def test_plans_of_many_shapes_are_dropped_and_told_of_once() -> None:
    step = flow.compile(nn.Identity(), placement=P)

    def run() -> None:
        for rows in range(1, SHAPES + 4):
            alike([step(torch.ones(rows))], [torch.ones(rows)])

    with pytest.warns(UserWarning, match=f"plans for {SHAPES} shapes of arguments, and drops the oldest") as told:
        run()
    assert len(told) == 1
    assert len(step._steps) == SHAPES
    alike([step(torch.ones(1))], [torch.ones(1)])
