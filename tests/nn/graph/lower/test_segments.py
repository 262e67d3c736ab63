"""Where a graph is cut into segments, and what goes in and out of each."""

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.boxing.graph.physical import Box, Op
from sbpflow.nn.graph.lower.segments import Draw, Segment, draws, segments

from ..graphs import GRAPHS, GRID, LINE, Build, aten, attention, data_parallel, maximum, sharded_parameters, total


def kinds(stages: tuple[object, ...]) -> str:
    return "".join({Segment: "s", Box: "b", Draw: "d"}[type(stage)] for stage in stages)


def test_ops_without_a_move_between_are_one_segment() -> None:
    (only,) = segments(data_parallel())
    assert isinstance(only, Segment)
    assert only.inputs == ("x", "w", "c")
    assert len(only.ops) == 4
    assert only.outputs == only.returns
    assert only.wants == ("w", "c")


def test_gathers_of_parameters_come_before_the_block_that_uses_them() -> None:
    assert kinds(segments(sharded_parameters(2))) == "bbsbbs"


def test_a_move_that_nobody_waits_for_cuts_nothing() -> None:
    b = Build(LINE)
    x = b.source("x", (8, 4), S(0))
    h = b.op(aten.sin.default, x, out=S(0))
    moved = b.box(h, S(1))
    y = b.op(aten.cos.default, h, out=S(0))  # goes on while h moves
    z = b.op(aten.mul.Tensor, b.box(y, S(1)), moved, out=S(1))
    assert kinds(segments(b.graph(total(b, z, P)))) == "sbbs"


def test_placements_and_blocks_end_segments() -> None:
    assert [s.placement for s in segments(GRAPHS["pipeline"]()) if isinstance(s, Segment)] == [GRID[0], GRID[1]]
    blocks = [{op.origin.block for op in s.ops} for s in segments(attention(3)) if isinstance(s, Segment)]
    assert all(len(names) == 1 for names in blocks)


def test_equal_blocks_give_equal_segments() -> None:
    shapes = [(len(s.ops), len(s.inputs), len(s.outputs)) for s in segments(attention(5)) if isinstance(s, Segment)]
    assert len(set(shapes[3:-2])) <= 2


def test_only_what_others_use_comes_out() -> None:
    b = Build(LINE)
    x = b.input("x", (8, 4), S(0))
    top, at = b.op(aten.max.dim, x, 1, out=[S(0), S(0)])
    unused = b.op(aten.neg.default, top, out=S(0))
    (segment,) = segments(b.graph(result=at))
    assert isinstance(segment, Segment)
    assert segment.outputs == (at.name,)
    assert unused.name not in segment.outputs


def test_gradients_go_only_where_the_loss_depends_on_something() -> None:
    stages = segments(GRAPHS["several losses"]())
    wanted = {name for stage in stages if isinstance(stage, Segment) for name in stage.wants}
    assert "unseen" not in wanted
    assert {"w", "v"} <= wanted


def test_a_maximum_without_gradient_gets_none() -> None:
    graph = GRAPHS["classes"]()
    top = next(box for box in graph.boxes if graph.layout(box.source).state.reduction == "max")
    assert not any(top.output.name in s.wants for s in segments(graph) if isinstance(s, Segment))
    boxes = [box.output.name for box in maximum().boxes]
    assert any(set(boxes) & set(s.wants) for s in segments(maximum()) if isinstance(s, Segment))


@pytest.mark.parametrize(
    ("op", "args", "random"),
    [
        (aten.rand.default, ([3],), True),
        (aten.arange.default, (3,), False),
        (aten.dropout.default, (None, 0.5, False), False),
        (aten.dropout.default, (None, 0.5, True), True),
        (aten.scaled_dot_product_attention.default, (None, None, None), False),
        (aten.scaled_dot_product_attention.default, (None, None, None, None, 0.1), True),
    ],
)
def test_what_is_told_not_to_draw_does_not(op: torch._ops.OpOverload, args: tuple[object, ...], random: bool) -> None:
    assert draws(Op(op, args, {}, ())) == random


def test_draws_stand_in_the_order_of_the_program() -> None:
    b = Build(LINE)
    x = b.input("x", (4,), B)
    chance = b.op(aten.sigmoid.default, x, out=B)
    first = b.op(aten.bernoulli.default, chance, out=B)
    second = b.op(aten.rand_like.default, x, out=B)  # needs no value, but must not be drawn before
    y = b.op(aten.add.Tensor, first, second, out=B)
    stages = segments(b.graph(result=y))
    assert kinds(stages) == "sdds"
    assert [s.outputs for s in stages if isinstance(s, Draw)] == [(first.name,), (second.name,)]
    assert stages[2].inputs == ()


def test_a_draw_with_a_gradient_is_refused() -> None:
    b = Build(LINE)
    x = b.source("x", (4,), B)
    y = b.op(aten.dropout.default, x, 0.5, True, out=B)
    with pytest.raises(flow.SbpflowError, match=r"dropout.* draws random numbers and has a gradient"):
        segments(b.graph(b.op(aten.sum.default, y, out=B)))
