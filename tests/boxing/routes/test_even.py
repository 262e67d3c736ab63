"""Even moves: what is worked out in closed form is what the programs of all ranks receive and send."""

from itertools import product

import pytest

import sbpflow as flow
from sbpflow.boxing.boxing import between
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
