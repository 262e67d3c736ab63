"""Even moves: what is worked out in closed form is what the programs of all ranks receive and send."""

from itertools import product
from typing import Any

import pytest

import sbpflow as flow
from sbpflow.boxing.boxing import between
from sbpflow.boxing.routes import route
from sbpflow.sbp import Sbp

ENTRIES: tuple[Sbp, ...] = (flow.B, flow.P, flow.S(0), flow.S(1))


@pytest.mark.parametrize("shape", [(16, 32), (16, 40), (7, 9), ()], ids=["even", "odd pieces", "uneven", "scalar"])
@pytest.mark.parametrize("grid", [(4,), (2, 4)], ids=str)
def test_bytes_are_those_of_all_programs(grid: tuple[int, ...], shape: tuple[int, ...]) -> None:
    ranks = 1
    for size in grid:
        ranks *= size
    where = flow.placement("cpu", range(ranks)).reshape(grid)
    entries = ENTRIES if shape else ENTRIES[:2]
    with flow.use_cluster("two_level"):
        for a, b in product(product(entries, repeat=len(grid)), repeat=2):
            way = between(*(flow.layout(where, each, shape) for each in (a, b)))
            assert way.bytes == max(way.received(rank) for rank in way.ranks), str(way)
            assert way.total == sum(way.sent(rank) for rank in way.ranks), str(way)


@pytest.mark.parametrize("shape", [(16, 32), (7, 9), ()], ids=["even", "uneven", "scalar"])
@pytest.mark.parametrize("there", [range(4, 8), range(4, 6), range(2, 6), range(2, 14)], ids=str)
def test_bytes_to_another_placement_are_those_of_all_programs(there: range, shape: tuple[int, ...]) -> None:
    src, dst = flow.placement("cpu", [[0, 1], [2, 3]]), flow.placement("cpu", there).reshape((2, len(there) // 2))
    entries = ENTRIES if shape else ENTRIES[:2]
    with flow.use_cluster("two_level"):
        for a, b in product(product(entries, repeat=2), repeat=2):
            way = between(flow.layout(src, a, shape), flow.layout(dst, b, shape))
            assert way.bytes == max(way.received(rank) for rank in way.ranks), str(way)
            assert way.total == sum(way.sent(rank) for rank in way.ranks), str(way)


def test_no_rank_is_asked_where_all_hold_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    where = flow.placement("cpu", range(1024)).reshape((128, 8))
    way = between(
        flow.layout(where, (flow.P, flow.P), (4096, 4096)), flow.layout(where, (flow.B, flow.B), (4096, 4096))
    )
    next_stage = flow.placement("cpu", range(1024, 2048)).reshape((128, 8))
    hop = between(
        flow.layout(where, (flow.S(0), flow.B), (4096, 64)), flow.layout(next_stage, (flow.S(0), flow.B), (4096, 64))
    )
    monkeypatch.setattr(type(way), "programs", lambda self, rank: pytest.fail("a rank was asked"))
    assert way.bytes > 0
    assert way.total > way.bytes
    assert (hop.bytes, hop.total) == (4 * 4096 * 64 // 128, 4 * 4096 * 64 * 8)


def test_a_route_is_searched_once_for_placements_of_equal_links(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 0
    searched = route._searched

    def counted(*args: Any) -> Any:
        nonlocal many
        many += 1
        return searched(*args)

    monkeypatch.setattr(route, "_searched", counted)
    with flow.use_cluster("two_level"):
        for first in (0, 8, 16):
            where = flow.placement("cpu", range(first, first + 8)).reshape((2, 4))
            between(
                flow.layout(where, (flow.S(0), flow.P), (1234, 57)), flow.layout(where, (flow.B, flow.S(1)), (1234, 57))
            )
    assert many == 1


def test_where_ranks_hold_unequal_parts_they_are_counted_without_what_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    where = flow.placement("cpu", range(512)).reshape((64, 8))
    ends: list[tuple[tuple[Sbp, ...], ...]] = [
        ((flow.S(0), flow.S(1)), (flow.B, flow.S(1))),
        ((flow.P, flow.B), (flow.B, flow.B)),
    ]
    ways = [between(*(flow.layout(where, each, (100, 9)) for each in pair)) for pair in ends]
    monkeypatch.setattr(type(ways[0]), "programs", lambda self, rank: pytest.fail("a rank was asked"))
    for way in ways:
        assert 0 < way.bytes < way.total
        assert sum(way.busiest) >= way.bytes
