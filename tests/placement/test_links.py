"""Links: the formulas of the table of collectives, and groups that pay for their slowest link."""

from math import ceil, log2

import pytest

from sbpflow.placement import cluster, placement
from sbpflow.placement.links import EVERYBODY_ADDS, Links, Price

LATENCY, BANDWIDTH = 8.0, 4.0
RANKS = [2, 3, 4, 8, 16, 64]


def line(ranks: int) -> Links:
    return Links((ranks,), lambda axes, ways: (LATENCY, BANDWIDTH))


@pytest.mark.parametrize("ranks", RANKS)
def test_each_collective_receives_what_the_table_says(ranks: int) -> None:
    size, n = 4096.0, ranks
    moved = {
        "all_gather": size * (n - 1) / n,
        "reduce_scatter": size * (n - 1),
        "all_reduce": 2 * size * (n - 1) / n,
        "all_reduce_once": size * (n - 1),
    }
    assert {kind: line(n).price(kind, (0,), size).bytes for kind in moved} == moved


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_reduce_once"])
def test_time_is_hops_times_latency_and_bytes_over_bandwidth(kind: str, ranks: int) -> None:
    price = line(ranks).price(kind, (0,), 4096.0)
    hops = {"all_reduce": 2 * ceil(log2(ranks))}.get(kind, ceil(log2(ranks)))
    if kind == "all_reduce_once":
        hops = max(hops, (ranks - 1) / 8)  # type: ignore[assignment]
    work = EVERYBODY_ADDS if kind == "all_reduce_once" else 1.0
    assert price.time == pytest.approx(hops * LATENCY + work * price.bytes / BANDWIDTH, rel=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_exchange_pays_for_its_messages_and_its_bytes(ranks: int) -> None:
    hops = max(ceil(log2(ranks)), (ranks - 1) / 8)
    assert line(ranks).seconds("exchange", (0,), 4096.0) == hops * LATENCY + 4096.0 / BANDWIDTH


@pytest.mark.parametrize("ranks", RANKS)
def test_where_latency_rules_one_exchange_beats_two_where_bytes_rule_it_does_not(ranks: int) -> None:
    small, large = ([line(ranks).price(k, (0,), n).time for k in ("all_reduce", "all_reduce_once")] for n in (0.0, 1e9))
    assert small[0] > small[1]
    assert large[0] < large[1] or ranks == 2


def test_axes_together_are_one_group() -> None:
    grid_ = Links((2, 4), lambda axes, ways: (0.0, 1.0))
    assert grid_.ranks((0, 1)) == 8
    assert grid_.price("all_gather", (0, 1), 80.0) == Price(70.0, 70.0)


def test_a_group_pays_for_the_slowest_link_that_it_spans() -> None:
    p = placement("cpu:[0-7] as (node=2, device=4)")
    links = Links.of(p, cluster("two_level").with_node(4))
    assert [links.price("all_gather", axes, 64.0).time for axes in ((1,), (0,), (0, 1))] == [48.0, 256.0, 448.0]


def test_without_latency_only_bytes_cost() -> None:
    links = line(4).without_latency
    assert links.seconds("exchange", (0,), 0.0) == 0.0
    assert links.seconds("exchange", (0,), 64.0) == 64.0 / BANDWIDTH
