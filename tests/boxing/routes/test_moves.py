"""Moves: their bytes are exactly those a rank will receive, small ones take latency and large ones bandwidth."""

import pytest

from sbpflow.boxing import between
from sbpflow.boxing.graph.move_table import ways_of
from sbpflow.placement import cluster, placement, use_cluster
from sbpflow.placement.links import Links, Price
from sbpflow.sbp import B, Broadcast, Layout, P, Partial, S, Split, layout
from tests.boxing.oracle import GRIDS, broken, every_pair, grid, network, ordered, sample

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
ON_NETWORKS = pytest.mark.parametrize("prices", ["flat", "two_level", "cpu"])


@pytest.mark.sampled(6)
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
    way = between(src, dst)
    assert way.price.bytes == pytest.approx(way.bytes), f"{way.price.bytes} for {way}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(33, 35), (9, 10), (2, 3)], ids=str)
@ON_ALL_GRIDS
def test_uneven_pieces_are_priced_by_the_largest(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """A price is at most one element a dim and step off; it may say too much, hardly too little."""
    pairs = sample(every_pair(ordered(grid(*axes), shape)), 100, (axes, shape))
    with use_cluster("flat"):
        ways = [between(*pair) for pair in pairs]
    assert [str(way) for way in ways if way.bytes > way.price.bytes + sum(shape) * 8 * len(way.moves)] == []


@pytest.mark.parametrize("prices", ["cpu", "a100x8", "h100x8", "h200x8"])
def test_by_the_presets_small_moves_take_latency_and_large_ones_bandwidth(prices: str) -> None:
    p = placement("cpu:[0-7]")
    with use_cluster(prices):
        small, large = (between(layout(p, P, (n,)), layout(p, B, (n,))).price.time for n in (8, 1 << 28))
        latency, bandwidth = cluster(prices).link(p, (0,))
    assert latency <= small <= 20 * latency
    assert large == pytest.approx(2 * 7 / 8 * (4 << 28) / bandwidth, rel=0.05)


def test_an_axis_of_one_rank_costs_nothing() -> None:
    p = placement("cpu:[0-3] as (1, 4)")
    with use_cluster("cpu"):
        assert between(layout(p, (S(0), B), (8,)), layout(p, (P, B), (8,))).price == Price(0, 0)


def test_a_plan_for_cuda_leaves_adding_up_to_the_backend_however_small_the_sum() -> None:
    """It needs no GPU. To add up by hand what is small pays on the cores of a host; on a card each term is a kernel."""
    for device in ("cpu", "cuda"):
        src = layout(placement(f"{device}:[0-3]"), P, (4,))
        by_hand = device == "cpu"
        assert ("all_reduce_once" in [move.kind for move in between(src, src.to(B)).moves]) == by_hand
        assert ("all_reduce_once" in Links.of(src.placement, cluster("flat")).reductions) == by_hand


@pytest.mark.parametrize("size", [4, 24, 256, 4096])
def test_a_sum_on_its_way_to_other_ranks_is_gathered_for_nobody_who_wants_pieces(size: int) -> None:
    """Messages of one rank are on their way at once: four latencies for four pieces made gathering look cheaper."""
    src, dst = (layout(placement("cuda", range(*ends)), sbp, (size, size)) for ends, sbp in (((4,), P), ((4, 6), S(0))))
    way = between(src, dst)
    assert way.route == "reduce_scatter, transfer"
    assert way.total == 4 * src.nbytes


@pytest.mark.parametrize(("src", "dst", "wholes"), [(P, S(0), 1), (S(0), B, 1), (P, B, 2)], ids=str)
def test_over_an_axis_that_crosses_hosts_each_of_them_sends_what_the_others_lack_once(
    src: Partial, dst: Broadcast | Split, wholes: int
) -> None:
    """Added up inside of a host before, gathered there behind: 4 hosts of 2 ranks send three quarters of the tensor
    each time, and twice as much where every rank sends to every other."""
    p = placement("cpu:[0-7]")
    with use_cluster(cluster("two_level").with_node(2)):
        way = between(layout(p, src, (64, 16)), layout(p, dst, (64, 16)))
    parts = [
        (rank, part) for rank in p.flat for exchanges in way.programs(rank) for one in exchanges for part in one.sends
    ]
    assert sum(part.numel for rank, part in parts if part.peer // 2 != rank // 2) == wholes * 3 * 64 * 16


def test_a_card_leaves_hosts_to_the_collectives_of_its_backend() -> None:
    p = placement("cuda:[0-15]")
    with use_cluster("h100x8"):
        assert all(move.src.placement is p for move in between(layout(p, P, (64, 16)), layout(p, B, (64, 16))).moves)


def test_steps_between_hosts_and_inside_of_them_are_told_as_over_the_axis_that_crosses_them() -> None:
    p = placement("cpu:[0-7] as (data=8)")
    with use_cluster(cluster("two_level").with_node(2)):
        ways = ways_of(between(layout(p, P, (64, 16)), layout(p, B, (64, 16))))
    assert [(way.kind, way.axes) for way in ways] == [
        ("reduce_scatter", ("data",)), ("all_reduce", ("data",)), ("all_gather", ("data",)),
    ]  # fmt: skip
