"""A composite of one's own over two axes: how values lie on each of them, and which of them they go round."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import P, S
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.boxing.graph.text.text import to_text
from sbpflow.placement.errors import PlacementError, SbpError

from .ring import F64, numbers

library: Any = torch.library.Library("axes_test", "DEF")  # type: ignore[no-untyped-call]
library.define("part(Tensor x, Tensor weight, int[] rows) -> Tensor")
library.impl("part", lambda x, weight, rows: x[:, rows[0] : rows[1]] @ weight, "CompositeImplicitAutograd")


@flow.nn.composite("two_axes", of="mm", axes=2)
def two_axes(axis: Any, x: Any, weight: Any) -> Any:
    """Rows over the first axis; the weight goes round the second, and its columns lie over the first."""
    here, around = axis.axes
    mine, held, total = x.lying({here: S(0)}), weight.lying({around: S(0)}), None
    for turn in range(around.size):
        piece = held.turned(turn, around)
        gives = {here: S(0)}
        more = axis.run(torch.ops.axes_test.part, mine, piece, piece.indices(0), gives=gives, round=turn)
        total = more if total is None else axis.run(torch.ops.aten.add.Tensor, total, more, gives=gives, round=turn)
    return total


@flow.nn.composite("addends_of_two", of="mm", axes=2)
def addends_of_two(axis: Any, x: Any, weight: Any) -> Any:
    rows, terms = axis.axes
    assert axis.rest(weight, terms) is S(0)
    lies = x.lying({rows: S(0), terms: S(1)}), weight.lying({terms: S(-2)})
    return axis.run(torch.ops.aten.mm.default, *lies, gives={rows: S(0), terms: P})


@flow.nn.composite("rows_as_called", of="mm")
def rows_as_called(axis: Any, x: Any, weight: Any) -> Any:
    return axis.call(torch.ops.aten.mm.default, x, weight, lies=S(0))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(9, 5, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(x, self.weight)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum()
    return out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", ["two_axes", "addends_of_two"])
@pytest.mark.parametrize("grid", ["(a=2, b=3)", "(b=3, a=2)", "(a=1, b=3)", "(c=2, a=2, b=2)"])
def test_values_lie_on_each_axis_as_said_and_learn(use: str, grid: str) -> None:
    ranks = {"(a=1, b=3)": 3, "(c=2, a=2, b=2)": 8}.get(grid, 6)
    where = flow.placement(f"cpu:[0-{ranks - 1}] as {grid}")
    model = Product()
    alone = copy.deepcopy(model)
    flow.nn.inside(model, use=use, over=("a", "b"))
    flow.nn.shard(model, {"weight": {"b": S(0)}})
    x = numbers(7, 9)
    step = flow.compile(model, squares, placement=where)
    found: Any = step(x)
    want = squares(alone, x)
    want.backward()  # type: ignore[no-untyped-call]
    grad: Any = model.weight.grad
    torch.testing.assert_close(found.full_tensor(), want.detach())
    torch.testing.assert_close(grad.full_tensor(), alone.weight.grad)
    text = step.plan_for(x).text()
    assert to_text(from_text(text)) == text


def test_pieces_change_hands_in_pairs_where_there_are_pairs() -> None:
    @flow.nn.composite("in_pairs", of="mm")
    def in_pairs(axis: Any, x: Any, weight: Any) -> Any:
        """Each rank does what another would have done, and hands it back."""
        rows = axis.run(torch.ops.aten.mm.default, x.lying(S(0)).swapped(2), weight, gives=S(0))
        return axis.run(torch.ops.aten.add.Tensor, rows.swapped(2), rows.swapped(2), gives=S(0), round=1)

    model, x = flow.nn.inside(Product(), use="in_pairs", over="a"), numbers(8, 9)
    found: Any = flow.compile(model, placement=flow.placement("cpu:[0-7] as (a=8)"))(x)
    torch.testing.assert_close(found.full_tensor(), 2 * x @ model.weight)
    other = flow.nn.inside(Product(), use="in_pairs", over="a")
    with pytest.raises(PlacementError, match="use in_pairs: 6 ranks of an axis do not pair up at a distance of 2"):
        flow.compile(other, placement=flow.placement("cpu:[0-5] as (a=6)")).plan_for(x)


def test_one_signature_is_not_enough_for_two_axes() -> None:
    @flow.nn.composite("vague", of="mm", axes=2)
    def vague(axis: Any, x: Any, weight: Any) -> Any:
        return axis.run(torch.ops.aten.mm.default, x.lying(S(0)), weight, gives=S(0))

    model = flow.nn.inside(Product(), use="vague", over=("a", "b"))
    where = flow.placement("cpu:[0-3] as (a=2, b=2)")
    with pytest.raises(SbpError, match=r"vague: S\(0\) on which of 2 axes"):
        flow.compile(model, placement=where).plan_for(torch.ones(4, 9, dtype=F64))


@pytest.mark.parametrize("rows", [5, 8])
def test_a_call_lies_as_its_composite_says_in_uneven_pieces_too(rows: int) -> None:
    """It lay whole, without a word, and then was refused: no rule would cut five rows over four ranks by itself."""
    where = flow.placement("cpu:[0-3] as (a=4)")
    model = flow.nn.inside(Product(), use="rows_as_called", over="a")
    whole = numbers(rows, 9)
    found: Any = flow.compile(model, placement=where)(flow.tensor(whole, placement=where, sbp="B"))
    assert found.sbp == (S(0),)
    torch.testing.assert_close(found.full_tensor(), whole @ model.weight)
