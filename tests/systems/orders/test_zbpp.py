"""Zero bubble: the fixed orders' bubble rates to the last digit, and orders that are searched under ZB-1p's and ZB-2p's
memory. Times are those of the paper's table 9 in ms, rates those of its table 5."""

import pytest

from sbpflow.actors import Costs, published, search
from tests.nn.graph.pipes import ALONE2, mlp, staged, trains

# An activation takes 2, of which B frees 1 and W the other: as the paper counts, and its limits p M_B and 2p M_B.
Times = tuple[float, float, float, float]
# By p, m and times the rates of 1F1B, ZB-H1, ZB-H2, ZB-1p and ZB-2p.
PROFILED: list[tuple[int, int, Times, tuple[float, ...]]] = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
]


def profiled(times: Times) -> Costs:
    forward, backward, weight, hop = times
    return Costs(forward, backward, weight, hop, bytes=2, freed=1)


def check_fixed(p: int, m: int, times: Times, rates: tuple[float, ...]) -> None:
    drawn = (published(name).show(p, m, costs=Costs(*times)) for name in ("1f1b", "zb_h1", "zb_h2"))
    assert tuple(round(each.bubble, 4) for each in drawn) == rates[:3]


def check_searched(p: int, m: int, times: Times, rates: tuple[float, ...], effort: float) -> None:
    for factor, rate in ((1, rates[3]), (2, rates[4])):
        limit = 2 * factor * p
        found = search(p, m, costs=profiled(times), memory=limit, by="span", effort=effort)
        assert max(found.memory) <= limit
        assert found.bubble <= rate + 0.01
        assert found.bound <= found.value
        assert found.gap < 0.065


def test_bubbles_of_fixed_orders_are_the_published_ones() -> None:
    for p, m, times, rates in PROFILED[:3]:
        check_fixed(p, m, times, rates)


def test_searched_orders_have_the_published_bubbles() -> None:
    check_searched(*PROFILED[0], effort=0.3)
    check_searched(*PROFILED[1], effort=0.3)


@pytest.mark.sweep
@pytest.mark.parametrize(("p", "m", "times", "rates"), PROFILED)
def test_all_published_bubbles_are_met(p: int, m: int, times: Times, rates: tuple[float, ...]) -> None:
    check_fixed(p, m, times, rates)
    check_searched(p, m, times, rates, effort=1.6)


def test_whole_slots_are_a_stricter_limit_than_the_paper_s() -> None:
    """Where an activation is all there until W, the same number of micro-batches may begin, and no more."""
    p, m, times, _ = PROFILED[0]
    strict = search(p, m, costs=Costs(*times), memory=2 * p, by="span", effort=0.2)
    assert max(strict.slots) <= 2 * p
    paper = search(p, m, costs=profiled(times), memory=4 * p, by="span", effort=0.2)
    assert paper.value <= strict.value
    assert max(paper.slots) > 2 * p


def test_a_searched_order_trains_as_one_device() -> None:
    found = search(2, 4, costs=Costs(3, 3, 2, 0.5), memory=3)
    trains(staged(mlp().double(), ALONE2, found.schedule), schedule=found.schedule, steps=2)
