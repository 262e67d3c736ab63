"""Prices: the formulas of the table, and bytes that are exactly those a rank will receive."""

import itertools
from math import ceil, log2, prod

import pytest

from sbpflow.boxing import plan
from sbpflow.boxing.routes.price import EVERYBODY_ADDS, AxisLinks, Price, extent, missing, truly_missing
from sbpflow.placement import cluster, placement, use_cluster
from sbpflow.sbp import B, Layout, P, S, layout
from tests.boxing.oracle import GRIDS, broken, every_pair, grid, held, holed, indices, network, ordered, sample

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
ON_NETWORKS = pytest.mark.parametrize("prices", ["flat", "two_level", "cpu"])
LATENCY, BANDWIDTH = 8.0, 4.0
RANKS = [2, 3, 4, 8, 16, 64]


def line(ranks: int) -> AxisLinks:
    return AxisLinks((ranks,), lambda axes: (LATENCY, BANDWIDTH))


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
    assert line(ranks).exchange((0,), 4096.0) == Price(hops * LATENCY + 4096.0 / BANDWIDTH, 4096.0)


@pytest.mark.parametrize("ranks", RANKS)
def test_where_latency_rules_one_exchange_beats_two_where_bytes_rule_it_does_not(ranks: int) -> None:
    small, large = ([line(ranks).price(k, (0,), n).time for k in ("all_reduce", "all_reduce_once")] for n in (0.0, 1e9))
    assert small[0] > small[1]
    assert large[0] < large[1] or ranks == 2


def test_axes_together_are_one_group() -> None:
    grid_ = AxisLinks((2, 4), lambda axes: (0.0, 1.0))
    assert grid_.ranks((0, 1)) == 8
    assert grid_.price("all_gather", (0, 1), 80.0) == Price(70.0, 70.0)


def test_a_group_pays_for_the_slowest_link_that_it_spans() -> None:
    p = placement("cpu:[0-7] as (node=2, device=4)")
    links = AxisLinks.of(p, cluster("two_level").with_node(4))
    assert [links.price("all_gather", axes, 64.0).time for axes in ((1,), (0,), (0, 1))] == [48.0, 256.0, 448.0]


@pytest.mark.parametrize("size", [0, 1, 5, 8, 24, 33])
@pytest.mark.parametrize("factors", [(), (0,), (1,), (0, 1), (1, 0), (-2, 1), (-3, 0), (0, -2, 1)], ids=str)
def test_the_extent_is_the_longest_piece(size: int, factors: tuple[int, ...]) -> None:
    axes = (3, 4)
    longest = max(len(indices(size, factors, at, axes)) for at in itertools.product(*map(range, axes)))
    found = extent(size, factors, axes)
    assert longest <= found <= size
    assert found == longest or any(f < 0 for f in factors)  # of pieces of pieces all may not be longest at once


@pytest.mark.parametrize("axes", [(4,), (2, 2), (2, 4), (3, 2), (2, 2, 2)], ids=str)
def test_missing_is_what_the_worst_rank_lacks(axes: tuple[int, ...]) -> None:
    shape = (48, 48)
    layouts = [lies for lies in [*ordered(grid(*axes), shape), *holed(grid(*axes), shape)] if not lies.state.partial]
    pairs = sample(every_pair(layouts), 300, axes)
    assert broken(pairs, counts_what_is_missing) == []


def counts_what_is_missing(src: Layout, dst: Layout) -> None:
    found = missing(src.shape, src.state.dims, dst.state.dims, src.placement.shape)
    want = max(lacks(src, dst, rank) for rank in src.placement.flat)
    assert found == pytest.approx(want), f"{found} for {want}"


def lacks(src: Layout, dst: Layout, rank: int) -> int:
    """Elements that the rank needs and does not hold."""
    have, need = ([{*index.tolist()} for index in held(lies, rank)] for lies in (src, dst))
    return prod(map(len, need)) - prod(len(h & n) for h, n in zip(have, need, strict=True))


@ON_ALL_GRIDS
@ON_NETWORKS
def test_the_bytes_of_a_price_are_those_that_the_busiest_rank_receives(axes: tuple[int, ...], prices: str) -> None:
    layouts = ordered(grid(*axes), (48, 96))
    pairs = sample(every_pair(layouts), 200 if len(axes) < 3 else 40, (axes, prices))
    with use_cluster(network(prices, axes)):
        assert broken(pairs, is_priced_by_its_bytes) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@ON_NETWORKS
def test_the_bytes_of_every_price_are_those_received(axes: tuple[int, ...], prices: str) -> None:
    layouts = ordered(grid(*axes), (48, 96))
    pairs = list(every_pair(layouts))
    with use_cluster(network(prices, axes)):
        assert broken(pairs if len(axes) < 3 else sample(pairs, 2000, prices), is_priced_by_its_bytes) == []


def is_priced_by_its_bytes(src: Layout, dst: Layout) -> None:
    way = plan(src, dst)
    assert way.price.bytes == pytest.approx(way.bytes), f"{way.price.bytes} for {way}"


@pytest.mark.parametrize("shape", [(33, 35), (9, 10), (2, 3)], ids=str)
@ON_ALL_GRIDS
def test_uneven_pieces_are_priced_by_the_largest(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """A price is at most one element a dim and step off; it may say too much, hardly too little."""
    pairs = sample(every_pair(ordered(grid(*axes), shape)), 100, (axes, shape))
    with use_cluster("flat"):
        ways = [plan(*pair) for pair in pairs]
    assert [str(way) for way in ways if way.bytes > way.price.bytes + sum(shape) * 8 * len(way.moves)] == []


@pytest.mark.parametrize("prices", ["cpu", "a100x8", "h100x8", "h200x8"])
def test_by_the_presets_small_moves_take_latency_and_large_ones_bandwidth(prices: str) -> None:
    p = placement("cpu:[0-7]")
    with use_cluster(prices):
        small, large = (plan(layout(p, P, (n,)), layout(p, B, (n,))).price.time for n in (8, 1 << 28))
        latency, bandwidth = cluster(prices).link(p, (0,))
    assert latency <= small <= 20 * latency
    assert large == pytest.approx(2 * 7 / 8 * (4 << 28) / bandwidth, rel=0.05)


def test_an_axis_of_one_rank_costs_nothing() -> None:
    p = placement("cpu:[0-3] as (1, 4)")
    with use_cluster("cpu"):
        assert plan(layout(p, (S(0), B), (8,)), layout(p, (P, B), (8,))).price == Price(0, 0)


def test_who_holds_all_lacks_nothing_and_who_holds_half_lacks_half() -> None:
    assert missing((8,), ((),), ((0,),), (2,)) == 0
    assert missing((8,), ((0,),), ((),), (2,)) == 4


@ON_ALL_GRIDS
@pytest.mark.parametrize("shape", [(5, 3), (7, 2), (3, 11)], ids=str)
def test_bytes_truly_missing_are_those_of_the_worst_of_all_ranks(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Counted index by index on every rank, for splits that leave remainders and pieces that are empty."""

    def lacks(src: Layout, dst: Layout, rank: int) -> int:
        needs, common = 1, 1
        for have, need in zip(held(src, rank), held(dst, rank), strict=True):
            needs *= len(need)
            common *= len({*have.tolist()} & {*need.tolist()})
        return needs - common

    for src, dst in sample(every_pair(ordered(grid(*axes), shape)), 60, (axes, shape)):
        wanted = max(lacks(src, dst, rank) for rank in src.placement.flat)
        assert truly_missing(shape, src.state.dims, dst.state.dims, axes) == wanted, (src, dst)


def test_a_plan_for_cuda_leaves_adding_up_to_the_backend_however_small_the_sum() -> None:
    """It needs no GPU. To add up by hand what is small pays on the cores of a host; on a card each term is a kernel."""
    for device in ("cpu", "cuda"):
        src = layout(placement(f"{device}:[0-3]"), P, (4,))
        by_hand = device == "cpu"
        assert ("all_reduce_once" in [move.kind for move in plan(src, src.to(B)).moves]) == by_hand
        assert ("all_reduce_once" in AxisLinks.of(src.placement, cluster("flat")).reductions) == by_hand
