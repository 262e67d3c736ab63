"""Bundles have all that ranks need and do not hold, once, and no more than fits at a time."""

from collections import Counter
from itertools import product

import pytest

from sbpflow.boxing.bundle import bundled, refilling
from sbpflow.boxing.routes.bound import least_sent, lower_bound
from sbpflow.placement import placement
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import Layout, layout

PLACES = {
    "4": placement("cpu:[0-3]"),
    "2x2": placement("cpu:[0-3] as (2, 2)"),
    "2 others": placement("cpu:[4-5]"),
    "3 of both": placement("cpu", [6, 1, 3]),
    "1": placement("cpu", [2]),
}


def lies(where: str, shape: tuple[int, ...]) -> list[Layout]:
    p = PLACES[where]
    return [layout(p, sbp, shape) for sbp in product(["B", "S(0)", "S(1)"], repeat=p.ndim)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("shape", [(5, 7), (8, 4), (1, 3)], ids=str)
@pytest.mark.parametrize("there", PLACES)
@pytest.mark.parametrize("here", PLACES)
def test_ranks_get_what_they_need_and_do_not_hold(here: str, there: str, shape: tuple[int, ...]) -> None:
    for src, dst in product(lies(here, shape), lies(there, shape)):
        plan = refilling(src, dst)
        assert plan.total == least_sent(src, dst)
        assert plan.bytes == lower_bound(src, dst)


@pytest.mark.parametrize("limit", [48, 100, 1000])
def test_all_is_sent_once_and_never_more_than_fits(limit: int) -> None:
    pairs = [*zip(lies("2x2", (6, 8)), lies("2x2", (6, 8))[::-1], strict=True)]
    pairs += [*product(lies("4", (6, 8)), lies("2 others", (6, 8)))]
    plans = [refilling(*pair) for pair in pairs]
    sent, got = Counter[int](), Counter[int]()
    for bundle in bundled(plans, limit):
        for stage, group in enumerate(bundle.groups):
            for rank in group:
                out, come = (bundle.messages(rank, stage, out=way) for way in (True, False))
                sizes = [sum(piece.numel * 4 for pieces in each.values() for piece in pieces) for each in (out, come)]
                assert sum(sizes) <= limit
                sent[rank] += sizes[0]
                got[rank] += sizes[1]
    assert sent == +Counter({rank: sum(plan.sent(rank) for plan in plans) for rank in range(6)})
    assert got == +Counter({rank: sum(plan.received(rank) for plan in plans) for rank in range(6)})


def test_a_copy_for_many_is_fetched_in_pieces() -> None:
    """So one source need not send it to each."""
    plan = refilling(
        layout(placement("cpu", [0]), "B", (1024, 1024)), layout(placement("cpu:[1-8]"), "B", (1024, 1024))
    )
    assert plan.route == "transfer, all_gather"
    assert plan.sent(0) == plan.received(3) == 2**22


def test_addends_are_refused() -> None:
    p = PLACES["4"]
    with pytest.raises(SbpError, match="add them up first"):
        refilling(layout(p, "P", (4,)), layout(p, "B", (4,)))
