"""SUMMA on two axes, and with depth: the result of one device, blocks at rest, and the bytes of the papers."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from sbpflow.boxing.graph.physical import Op
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.placement.errors import PlacementError, SbpError
from tests.nn.composites.products import Columns
from tests.nn.composites.ring import F64
from tests.ranks import Ranks

from .blocks import BLOCKS, SQUARE, count, linear, shares, total, trained

TWO = ("row", "col")
DEEP: dict[str, Any] = {"row": S(0), "col": S(1), "depth": S(0)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    ("q", "shape", "out"),
    [(2, (16, 8), 12), (3, (13, 14), 17), (2, (4, 3, 8), 12), (3, (12, 5, 12), 13)],
    ids=["even", "uneven", "batch", "three"],
)
def test_it_computes_what_one_device_does(q: int, shape: tuple[int, ...], out: int, bias: bool) -> None:
    lies = {"row": S(0), "col": S(len(shape) - 1)}
    grid = f"cpu:[0-{q * q - 1}] as (row={q}, col={q})"
    trained(linear(shape[-1], out, bias), grid, "summa", TWO, BLOCKS, lies, *shape)


@pytest.mark.parametrize("rows", [3, 11, 13, 14])
def test_rows_that_do_not_divide_are_those_of_one_device(rows: int) -> None:
    trained(linear(16, 16, True), "cpu:[0-15] as (row=4, col=4)", "summa", TWO, BLOCKS, SQUARE, rows, 16)


@pytest.mark.parametrize("sizes", [(1, 8, 12), (5, 3, 1), (3, 1, 3), (3, 2, 5, 3)], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_fewer_than_ranks_are_fine(sizes: tuple[int, ...], depth: int) -> None:
    *shape, out = sizes
    lies = {**DEEP, "col": S(len(shape) - 1)}
    grid = f"cpu:[0-{4 * depth - 1}] as (row=2, col=2, depth={depth})"
    trained(linear(shape[-1], out, True), grid, "summa", ("depth", *TWO), BLOCKS, lies, *shape)


def test_a_weight_may_stand_the_other_way() -> None:
    trained(Columns(8, 12), "cpu:[0-3] as (row=2, col=2)", "summa", TWO, {"row": S(0), "col": S(1)}, SQUARE, 16, 8)


@pytest.mark.parametrize("q", [2, 3])
def test_forward_sends_both_factors_q_minus_1_times_and_backward_twice_that(q: int) -> None:
    """In the paper each step of q broadcasts a block of A along rows and one of B along columns: (q - 1)(A + B) bytes
    in all. The backward is A B^T and A^T B, each of which broadcasts one factor and reduces another."""
    n, inner, out = 36, 2 * q * q, 36
    a, b = n * inner * 8, inner * out * 8
    moves = trained(
        linear(inner, out), f"cpu:[0-{q * q - 1}] as (row={q}, col={q})", "summa", TWO, BLOCKS, SQUARE, n, inner
    )
    assert total(moves, "all_gather") == 2 * (q - 1) * (a + b)
    assert total(moves, "reduce_scatter") == (q - 1) * (a + b)
    assert count(moves)["all_gather"] == 2 * 2 * q
    assert count(moves)["reduce_scatter"] == 2 * q


def test_every_rank_rests_on_its_block() -> None:
    model = linear(8, 12)
    grid = "cpu:[0-3] as (row=2, col=2)"
    trained(model, grid, "summa", TWO, BLOCKS, SQUARE, 16, 8)
    assert shares(model) == {8 * 12 // 4}


def test_with_depth_the_weight_rests_on_all_ranks_and_is_gathered_over_depth_once() -> None:
    """2.5-D: (q - 1)(A + d B) bytes of panels forward, twice that backward; and B (d - 1) / d for each block of q * q
    that is gathered, and its gradient, reduced and scattered."""
    q, d, n, inner, out = 2, 2, 16, 8, 12
    a, b = n * inner * 8, inner * out * 8
    model, grid = linear(inner, out), "cpu:[0-7] as (row=2, col=2, depth=2)"
    rests = {**BLOCKS, "depth": S(1)}
    moves = trained(model, grid, "summa", ("depth", "row", "col"), rests, DEEP, n, inner)
    assert shares(model) == {inner * out // 8}
    assert total(moves, "all_gather") == 2 * (q - 1) * (a + d * b) + (d - 1) * b
    assert total(moves, "reduce_scatter") == (q - 1) * (a + d * b) + (d - 1) * b


def test_rows_may_be_split_on_another_axis_too() -> None:
    lies = {"data": S(0), **SQUARE}
    trained(linear(8, 12, True), "cpu:[0-7] as (data=2, row=2, col=2)", "summa", TWO, BLOCKS, lies, 16, 8)


def test_panels_of_the_next_step_are_gathered_beside_the_product_of_this_one() -> None:
    where, model = flow.placement("cpu:[0-3] as (row=2, col=2)"), linear(8, 12)
    flow.nn.inside(model, use="summa", over=TWO)
    flow.nn.shard(model, {"weight": BLOCKS})
    with torch.no_grad():
        text = flow.compile(model, placement=where).plan_for(torch.ones(16, 8, dtype=F64)).text()
    assert text.count("all_gather over col") == text.count("all_gather over row") == 2
    graph = from_text(text)
    assert {op.round.number for op in graph.steps if isinstance(op, Op) and op.round} >= {1, 2}


REFUSED = {
    "two rows, four columns": ((2, 4), (16, 8), r"row has 2 ranks and col 4.*\n.*\n.*in a square"),
    "no rows": ((2, 2), (0, 8), r"linear of \(0, 8\) and \(12, 8\) has nothing to multiply"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_axis_and_the_size(case: str) -> None:
    (rows, cols), shape, said = REFUSED[case]
    where = flow.placement("cpu", range(rows * cols)).reshape((rows, cols), ("row", "col"))
    model = linear(shape[-1], 12)
    flow.nn.inside(model, use="summa", over=TWO)
    with pytest.raises(SbpError, match=said):
        flow.compile(model, placement=where).plan_for(torch.ones(shape, dtype=F64))


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ("row", r"summa is over 2 or 3 axes.*name them, as in over=\('a', 'b'\)"),
        (("row", "row"), "an axis is named twice"),
        (("row", 1.5), "say over which axis"),
    ],
)
def test_it_is_over_axes_by_name(over: Any, said: str) -> None:
    with pytest.raises(PlacementError, match=said):
        flow.nn.inside(nn.Linear(2, 2), use="summa", over=over)


def on_ranks() -> list[tuple[str, int]]:
    return trained(linear(8, 12, True), "cpu:[0-3] as (row=2, col=2)", "summa", TWO, BLOCKS, SQUARE, 16, 8)


def test_processes_do_the_same(ranks4: Ranks) -> None:
    ranks4(on_ranks)
