"""Prices of all pairs at once are those of single moves: on one axis exactly, on several never far below a plan's."""

import pytest
import torch

import sbpflow as flow
from sbpflow.placement import cluster
from sbpflow.sbp.choose import quick
from sbpflow.sbp.joint.move_cost import Lie, dual, moved, network
from sbpflow.sbp.joint.options import source_states
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.state import State

LINE, GRID = flow.placement("cpu", range(4)), flow.placement("cpu:[0-3] as (a=2, b=2)")
CPU = cluster("cpu")


def states(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[State]:
    """All without addends, and those with addends on axes that split nothing."""
    plain = source_states(shape, sizes, ())
    free = {s: [a for a in range(len(sizes)) if a not in s.split] for s in plain}
    return plain + [s._replace(partial=tuple(axes)) for s, axes in free.items() if axes]


def test_on_one_axis_they_are_those_of_the_eager_choice() -> None:
    shape, net = (8, 16), network(LINE, CPU)
    lies = [Lie(s) for s in states(shape, LINE.shape)]
    found = moved(lies, lies, shape, 4, net, net)
    for i, a in enumerate(lies):
        for j, b in enumerate(lies):
            single = quick(shape, 4, a.state, b.state, LINE.shape, lambda axis: CPU.link(LINE, (axis,)))
            assert found[i, j] == pytest.approx(single)


@pytest.mark.parametrize("place", [LINE, GRID], ids=str)
def test_a_plan_takes_about_as_long_and_what_sends_nothing_is_free(place: flow.Placement) -> None:
    shape, net = (64, 64), network(place, CPU)
    lies = [Lie(s) for s in states(shape, place.shape)]
    found = moved(lies, lies, shape, 4, net, net)
    for i, a in enumerate(lies):
        for j, b in enumerate(lies):
            plan = flow.boxing.plan(*(Layout(place, x.state, shape, torch.float32) for x in (a, b)))
            assert (found[i, j] == 0) == (plan.price.time == 0)
            assert 0.7 * plan.price.time <= found[i, j] <= 4 * plan.price.time + 1e-12


def test_the_dual_of_the_dual_is_the_lie_again() -> None:
    for state in states((8, 16), GRID.shape):
        free = tuple(a for a in range(2) if a not in state.split and a not in state.partial)
        for lie in (Lie(state), Lie(state, free)):
            assert dual(dual(lie)) == lie


def test_between_placements_a_byte_costs_at_least_its_way() -> None:
    other = flow.placement("cpu", range(4, 6))
    here, there = network(LINE, CPU), network(other, CPU)
    (row,) = moved([Lie(State(((), ())))], [Lie(State(((0,), ()))), Lie(State(((), ())))], (64, 64), 4, here, there)
    assert 0 < row[0] <= row[1]
