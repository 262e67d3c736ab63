"""Choosing: what is looked at holds the cheapest there is."""

from itertools import product
from typing import Any

import pytest
import torch

from sbpflow.placement import Placement, default_cluster, placement
from sbpflow.placement.links import Links
from sbpflow.sbp.call import Call, Match, Way, tensors_in
from sbpflow.sbp.check import expand_line
from sbpflow.sbp.choose import candidates, choose, everywhere
from sbpflow.sbp.joint.move_cost import moved
from sbpflow.sbp.registry import find
from sbpflow.sbp.schema import named_op
from sbpflow.sbp.state import State

GRID = (2, 2)
OPS: dict[str, tuple[Any, ...]] = {
    "add.Tensor": ((8, 12), (12,)),
    "mul.Tensor": ((8, 12), (8, 1)),
    "mm": ((8, 12), (12, 16)),
    "linear": ((4, 8, 12), (16, 12), (16,)),
    "bmm": ((4, 8, 12), (4, 12, 8)),
    "relu": ((8, 12),),
    "neg": ((8, 12),),
    "sum": ((8, 12),),
    "where.self": ((8, 12), (8, 1), (12,)),
}


def call_of(name: str, shapes: tuple[Any, ...], states: tuple[State, ...], sizes: tuple[int, ...], *more: Any) -> Call:
    """A call of an op on tensors of these shapes that lie so."""
    op = named_op(name)
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    if name == "where.self":
        inputs[0] = inputs[0].bool()
    args = (*inputs, *more)
    return Call(op, args, {}, tuple(tensors_in(op(*args))), states, sizes)


def ways_of(call: Call) -> list[Way]:
    found = find(call)
    assert found is not None
    return candidates(call, found)


def cut(ndim: int, *dims: int | None) -> State:
    """Cut along a dim for each axis; None where it is whole there."""
    return State(tuple(tuple(a for a, dim in enumerate(dims) if dim == d) for d in range(ndim)))


def partial(ndim: int, *axes: int, reduction: Any = "sum") -> State:
    return State(((),) * ndim, axes, reduction)


def lies(shape: tuple[int, ...], addends: bool = True) -> list[State]:
    """Every state on one axis."""
    found = [cut(len(shape)), *(cut(len(shape), dim) for dim in range(len(shape)))]
    return [*found, partial(len(shape), 0)] if addends else found


def seconds(shape: tuple[int, ...], src: State, dst: State, p: Placement) -> float:
    return float(moved([src], [dst], shape, 4, Links.of(p, default_cluster(p)))[0, 0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPS)
def test_no_signature_that_is_left_out_would_be_cheaper(name: str, ranks: int) -> None:
    """But for those that would pad a split tensor with zeros, or a whole one, to join addends: that is never free."""
    p, shapes = placement("cpu", range(ranks)), OPS[name]
    never = {("where.self", 0), ("linear", 2)}  # booleans do not add up, and who has a bias of addends?
    for states in product(*(lies(shape, (name, at) not in never) for at, shape in enumerate(shapes))):
        call = call_of(name, shapes, states, p.shape)
        found = find(call)
        assert isinstance(found, Match)

        def price(way: Way) -> float:
            pairs = zip(shapes, states, way.inputs, strict=True)  # noqa: B023 called at once
            return sum(seconds(shape, have, need, p) for shape, have, need in pairs)

        def pads(way: Way) -> bool:
            pairs = zip(states, way.inputs, strict=True)  # noqa: B023 called at once
            return any(need.partial and not have.partial for have, need in pairs)

        every = min(price(way) for way in expand_line(found, call.op, ranks, call.inputs) if not pads(way))
        assert min(map(price, candidates(call, found))) <= every * 1.000001, states


@pytest.mark.parametrize("name", OPS)
def test_what_fits_need_not_move(name: str) -> None:
    """Whatever else is split elsewhere: there is a way in which this input stays, or the rule has none."""
    shapes = OPS[name]
    for states in product(*(lies(shape, addends=False) for shape in shapes)):
        call = call_of(name, shapes, states, (2,))
        found = find(call)
        assert isinstance(found, Match)
        every = expand_line(found, call.op, 2, call.inputs)
        looked_at = candidates(call, found)
        for i, state in enumerate(states):
            if state.split and any(way.inputs[i] == state for way in every):
                assert any(way.inputs[i] == state for way in looked_at)


def test_the_way_with_everything_whole_is_always_there() -> None:
    states = (cut(2, 0, 1), cut(2, 1, 0))
    call = call_of("mm", ((8, 12), (12, 16)), states, GRID)
    last, whole = ways_of(call)[-1], everywhere(call)
    assert (last.inputs, last.outputs) == (whole.inputs, whole.outputs)


def test_sums_and_extremes_are_not_mixed() -> None:
    """amax over both dims, each split on an axis, is one kind of partial; with addends on the other axis it is not."""
    call = call_of("amax", ((8, 12),), (cut(2, 0, 1),), GRID)
    assert any(way.outputs[0] == partial(0, 0, 1, reduction="max") for way in ways_of(call))
    mixed = State(((0,), ()), (1,))
    for way in ways_of(call_of("amax", ((8, 12),), (mixed,), GRID)):
        assert not (way.inputs[0].partial and way.outputs[0].reduction == "max")


def test_maxima_are_no_addends() -> None:
    top = partial(2, 0, reduction="max")
    call = call_of("neg", ((8, 12),), (top,), (2,))
    assert all(not way.inputs[0].partial for way in ways_of(call))


@pytest.mark.parametrize(("name", "hollow"), [("mm", True), ("amax", False)])
def test_ranks_are_left_with_nothing_only_where_the_op_can_take_it(name: str, hollow: bool) -> None:
    shapes = ((3, 8), (8, 4)) if name == "mm" else ((3, 8),)
    more = () if name == "mm" else ([1],)
    call = call_of(name, shapes, tuple(cut(2, 0) for _ in shapes), (4,), *more)
    assert any(way.inputs[0] == cut(2, 0) for way in ways_of(call)) is hollow


def test_an_axis_of_one_rank_does_nothing() -> None:
    call = call_of("mm", ((8, 12), (12, 16)), (cut(2), cut(2)), (1,))
    assert len(ways_of(call)) == 1


def test_holes_and_the_order_of_cuts_stay_where_ranks_run_the_op_itself() -> None:
    for held in (((-2, 1), ()), ((1, 0), ())):
        state = State(held)
        call = call_of("neg", ((8, 12),), (state,), GRID)
        assert any(way.inputs == (state,) and way.outputs == (state,) for way in ways_of(call))


def test_two_axes_do_two_things_at_once() -> None:
    call = call_of("mm", ((8, 12), (12, 16)), (cut(2, 0, 1), cut(2, None, 0)), GRID)
    want = Way((cut(2, 0, 1), cut(2, None, 0)), (State(((0,), ()), (1,)),))
    assert any((way.inputs, way.outputs) == (want.inputs, want.outputs) for way in ways_of(call))


def prices(table: dict[State, float]) -> Any:
    return lambda i, state: (table.get(state, 1.0), 0.0)


def test_the_cheapest_is_chosen_and_all_costs_are_told() -> None:
    states = (cut(2, 0), cut(2, 1))
    call = call_of("add.Tensor", ((8, 12), (8, 12)), states, (2,))
    ways = ways_of(call)
    way, costs = choose(call, ways, prices({cut(2, 1): 0.25}))
    assert way.inputs == (cut(2, 1), cut(2, 1))
    assert min(costs) == 0.5
    assert len(costs) == len(ways)


def test_of_equal_prices_the_way_that_moves_fewest_tensors_comes_first() -> None:
    states = (cut(2, 0), cut(2, 0), cut(2, 1))
    call = call_of("where.self", ((8, 12),) * 3, states, (2,))
    way, _ = choose(call, ways_of(call), lambda i, state: (1.0, 0.0))
    assert way.inputs == (cut(2, 0),) * 3
