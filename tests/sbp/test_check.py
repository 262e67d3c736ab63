"""The checker of rules: what holds passes, what does not is found, forward, backward and in place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.sbp.call import Call, Match, Piece, Way
from sbpflow.sbp.check import check_rule, check_way, expand_line
from sbpflow.sbp.rule import RuleAnswer, register
from sbpflow.sbp.state import State

ATEN = torch.ops.aten
F64 = torch.float64
WHOLE, PARTIAL, ROWS, COLUMNS = State(((), ())), State(((), ()), (0,)), State(((0,), ())), State(((), (0,)))
MM = [(ROWS, WHOLE, ROWS), (WHOLE, COLUMNS, COLUMNS), (COLUMNS, ROWS, PARTIAL), (PARTIAL, WHOLE, PARTIAL)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("x", "w", "out"), MM)
def test_what_holds_passes(x: State, w: State, out: State, ranks: int) -> None:
    args = torch.randn(4, 5, dtype=F64), torch.randn(5, 7, dtype=F64)
    assert check_way(ATEN.mm.default, args, {}, Way((x, w), (out,)), (ranks,)) is None


@pytest.mark.parametrize(("x", "w", "out"), [(PARTIAL, PARTIAL, PARTIAL), (ROWS, WHOLE, WHOLE), (COLUMNS, ROWS, WHOLE)])
def test_what_does_not_hold_is_found(x: State, w: State, out: State) -> None:
    args = torch.randn(4, 4, dtype=F64), torch.randn(4, 4, dtype=F64)
    assert check_way(ATEN.mm.default, args, {}, Way((x, w), (out,)), (2,)) is not None


def test_axes_of_a_grid_nest_and_leave_holes() -> None:
    x, w = State(((), (1, 0))), State(((1, 0), ()))
    args = torch.randn(3, 9, dtype=F64), torch.randn(9, 2, dtype=F64)
    assert check_way(ATEN.mm.default, args, {}, Way((x, w), (State(((), ()), (0, 1)),)), (2, 3)) is None
    holes = State(((-2, 1), ()))
    assert check_way(ATEN.neg.default, args[1:], {}, Way((holes,), (holes,)), (2, 3)) is None
    assert check_way(ATEN.neg.default, args[1:], {}, Way((holes,), (State(((1,), ())),)), (2, 3)) is not None


def test_maxima_combine_to_the_maximum() -> None:
    x, largest = torch.randn(5, 3, dtype=F64), State(((),), (0,), "max")
    assert check_way(ATEN.amax.default, (x, [0]), {}, Way((ROWS,), (largest,)), (2,)) is None
    assert check_way(ATEN.neg.default, (x[0],), {}, Way((largest,), (State(((),), (0,), "min"),)), (3,)) is None
    assert check_way(ATEN.neg.default, (x[0],), {}, Way((largest,), (largest,)), (3,)) is not None


def test_a_wrong_gradient_is_found() -> None:
    def blind(piece: Piece, x: Tensor) -> Tensor:
        return x.detach() * 2 + x - x.detach()

    way = Way((ROWS,), (ROWS,), blind)
    trouble = check_way(lambda x: x * 2, (torch.randn(4, 2, dtype=F64),), {}, way, (2,))
    assert trouble is not None
    assert "gradient of input 0" in trouble


def test_a_wrong_change_in_place_is_found() -> None:
    def count(x: Tensor, seen: Tensor) -> Tensor:
        seen += len(x)
        return x * 1.0

    args, line = (torch.randn(4, 2, dtype=F64), torch.zeros(3, dtype=F64)), State(((),))
    trouble = check_way(count, args, {}, Way((ROWS, line), (ROWS,)), (2,))
    assert trouble is not None
    assert "changed in place" in trouble
    assert check_way(count, args, {}, Way((COLUMNS, line), (COLUMNS,)), (2,)) is None


def test_a_local_function_knows_its_piece() -> None:
    def numbered(piece: Piece, n: Tensor) -> Tensor:
        return torch.arange(*piece.out_spans(0, 0)[0]) + n.sum() * 0

    way = Way((State(((),)),), (State(((0,),)),), numbered)
    assert (
        check_way(lambda n: torch.arange(7) + n.sum() * 0, (torch.zeros(2, dtype=torch.int64),), {}, way, (3,)) is None
    )


@register("sbpflow_check::twice")
def twice(call: Call) -> RuleAnswer:
    if len(call.inputs[0].shape) == 1:
        return Match(inputs=((0,),), outputs=((0,),), sizes=(call.inputs[0].shape[0],), linear=((0,),), hollow=True)
    return Match(inputs=((0, 1),), outputs=((0, 1),), sizes=tuple(call.inputs[0].shape), reduced={1: "sum"})


@pytest.fixture
def op() -> Any:
    with torch.library._scoped_library("sbpflow_check", "DEF") as lib:
        lib.define("twice(Tensor x) -> Tensor")
        lib.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")
        yield torch.ops.sbpflow_check.twice.default


def test_a_complete_rule_is_silent(op: Any) -> None:
    report = check_rule(op, torch.randn(5, dtype=F64))
    assert not report.wrong
    assert not report.missing
    assert str(report) == "every listed signature holds, and no other"


def test_a_wrong_and_a_missing_signature_both_show(op: Any) -> None:
    report = check_rule("sbpflow_check::twice", torch.randn(5, 4, dtype=F64))
    assert [text.split(":")[0] for text in report.wrong] == ["S(1) -> P on 2 ranks", "S(1) -> P on 3 ranks"]
    assert report.missing == [f"{s} on {n} ranks" for n in (2, 3) for s in ("P -> P", "S(1) -> S(1)")]


def test_means_are_weighted_by_their_share() -> None:
    match = Match(inputs=((0, 1),), outputs=((0,),), sizes=(2, 5), reduced={1: "avg"}, linear=((0,),))
    args = torch.randn(2, 5, dtype=F64), [1]
    ways = expand_line(match, ATEN.mean.dim, 3, args[:1])
    assert [way.outputs[0].sbp(1)[0].__repr__() for way in ways] == ["B", "P", "P"]
    assert all(check_way(ATEN.mean.dim, args, {}, way, (3,)) is None for way in ways)
