"""The search of a pipeline's order: what it finds keeps to its memory and to its bound, and nothing known is better."""

from typing import Any

import pytest

from sbpflow.actors import Costs, Schedule, curve, published, search
from sbpflow.placement.errors import ScheduleError


@pytest.mark.parametrize("way", ["loop", "vee"])
@pytest.mark.parametrize("split", [True, False])
def test_what_is_found_is_a_table_that_says_what_was_found(way: Any, split: bool) -> None:
    for p, m, memory in ((1, 3, 2), (2, 5, 3), (3, 4, 4), (4, 1, 2)):
        found = search(p, m, way=way, memory=memory, split=split, effort=0.02, costs=Costs(1, 2, 1.5, 0.25))
        assert isinstance(found.schedule, Schedule)
        assert found.schedule.way == way
        assert max(found.slots) <= memory
        assert found.bound <= found.value == found.end == found.schedule.show(costs=found.costs).end
        assert Schedule.read(str(found.schedule)) == found.schedule


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "interleaved", "zb_v", "v_half", "v_min"])
@pytest.mark.parametrize("hop", [0.0, 0.3])
def test_nothing_published_is_better_at_its_memory(name: str, hop: float) -> None:
    schedule, costs = published(name), Costs(1, 1.2, 0.7, hop)
    drawn = schedule.show(4, 8, costs=costs)
    found = search(
        4, 8, costs=costs, memory=max(drawn.slots), way="vee" if schedule.way == "vee" else "loop", v=schedule.v,
        split=schedule.split, effort=0.02,
    )  # fmt: skip
    assert found.end <= drawn.end
    assert found.bound <= drawn.end


def test_equal_times_find_the_published_times() -> None:
    """1F1B and ZB-H1 at their memory are the best there are, and the bound says so."""
    assert (search(4, 8, memory=4, split=False).end, search(4, 8, memory=4, split=False).bound) == (33, 33)
    assert (search(4, 8, memory=4).end, search(4, 8, memory=4).bound) == (27, 27)
    assert (search(4, 8, memory=7, by="span").value, search(4, 8, memory=7, by="span").bound) == (24, 24)


def test_an_order_above_its_bound_says_that_a_longer_search_may_find_a_better_one() -> None:
    times = Costs(18.522, 18.086, 9.337, 0.601, bytes=2, freed=1)
    found = search(8, 24, costs=times, memory=32, by="span", effort=0.02)  # above the paper's rate, .0433
    assert found.gap > 0
    assert str(found).endswith("; try effort=0.08")


@pytest.mark.parametrize("asked", [{"split": False, "memory": 4}, {"p": 2, "m": 2, "memory": 2}])
def test_an_order_that_nothing_beats_or_that_has_no_others_says_nothing_of_effort(asked: dict[str, Any]) -> None:
    assert "effort" not in str(search(**{"p": 4, "m": 8, **asked}))


def test_bytes_of_b_are_free_again_before_w() -> None:
    """On the last device of ZB-H2 seven micro-batches wait for W, of all but one of which B has freed its half."""
    whole, parts = (published("zb_h2").show(4, 8, costs=Costs(bytes=2, freed=freed)) for freed in (0, 1))
    assert whole.memory == (14, 14, 14, 14)
    assert (parts.memory[0], parts.memory[3]) == (14, 8)
    found = search(4, 12, costs=Costs(3, 3, 2, 0.5, bytes=2, freed=1), memory=16, by="span", effort=0.1)
    assert max(found.memory) <= 16
    assert max(found.slots) > 8


def test_chunks_may_hold_nothing_and_take_no_time() -> None:
    costs = [Costs(0, 1, 0, bytes=4), Costs(1, 1, 1), Costs(0, 0, 0)]
    found = search(3, 4, costs=costs, memory=8, effort=0.05)
    assert found.memory == (8, 0, 0)
    assert found.bound <= found.end


def test_more_memory_is_never_slower() -> None:
    found = curve(4, 8, range(2, 9), way="vee", effort=0.1)
    ends = [each.end for each in found]
    assert ends == sorted(ends, reverse=True)
    assert [each.limit for each in found] == list(range(2, 9))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"memory": 1, "way": "vee"}, "a micro-batch alone takes 2"),
        ({"memory": float("nan")}, "fits into nan slots"),
        ({"memory": 10, "costs": Costs(bytes=11)}, "fits into 10 bytes"),
        ({"way": "routes"}, "search of way='routes'"),
        ({"by": "bubble"}, "by='bubble'"),
        ({"effort": 0}, "effort=0"),
        ({"costs": [Costs()]}, "costs of 1 chunks for 2"),
        ({"m": 0}, "m=0"),
    ],
)
def test_what_cannot_be_searched_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        search(**{"p": 2, "m": 4, **asked})


def test_b_frees_no_more_than_there_is() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(bytes=1, freed=2\)"):
        Costs(bytes=1, freed=2)
