"""Controllable memory: chunks down the devices and up again, and an order for any memory between V-Min's and ZB-V's."""

import pytest

from sbpflow.actors import Costs, curve, published, search
from sbpflow.actors.schedules.v_orders import slots
from tests.nn.graph.pipes import ALONE2, mlp, staged, trains

PAPER = {"v_min": (4, 59), "v_half": (6, 53), "zb_v": (8, 51)}  # at p=4, m=8: slots of half a stage, and the end


@pytest.mark.parametrize("name", sorted(PAPER))
def test_the_published_orders_have_their_memory_and_time(name: str) -> None:
    drawn = published(name).show(4, 8)
    assert (max(drawn.slots), drawn.end) == PAPER[name]


def test_time_falls_with_memory_from_one_published_point_to_the_next() -> None:
    """The published points are on the curve, and the points between them lie between."""
    found = {int(each.limit): each for each in curve(4, 8, range(2, 9), way="vee", effort=0.1)}
    ends = [each.end for each in found.values()]
    assert ends == sorted(ends, reverse=True)
    assert all(max(each.slots) <= limit and each.bound <= each.end for limit, each in found.items())
    assert {limit: found[limit].end for limit, _ in PAPER.values()} == dict(PAPER.values())
    assert found[4].end > found[5].end > found[6].end > found[8].end
    assert found[6].gap == found[8].gap == 0  # no order is shorter


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["v_min", "v_half", "zb_v"])
@pytest.mark.parametrize("times", [(1, 1, 1, 0), (3, 2.5, 1.5, 0.2)])
def test_a_search_is_not_worse_than_the_published_orders(name: str, times: tuple[float, float, float, float]) -> None:
    costs = Costs(*times)
    for p, m in ((4, 8), (5, 12)):
        drawn = published(name).show(p, m, costs=costs)
        found = search(p, m, way="vee", costs=costs, memory=slots(name, p), effort=0.2)
        assert found.end <= drawn.end


def test_less_than_a_third_of_the_memory_is_possible() -> None:
    """Two half slots, one for each chunk: a micro-batch after the other, but for what W and F of two share."""
    found = search(4, 4, way="vee", memory=2, effort=0.1)
    assert max(found.slots) == 2
    assert found.end <= 4 * (4 * 8 + 2)


def test_a_searched_v_trains_as_one_device() -> None:
    found = search(2, 4, way="vee", memory=3)
    trains(staged(mlp().double(), ALONE2, found.schedule), schedule=found.schedule, steps=2)
