"""The price of a move by arithmetic is that of the planned route: the same on one axis, within bounds on two."""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
import torch

import sbpflow as flow
from sbpflow.boxing import between
from sbpflow.placement import Cluster, cluster, use_cluster
from sbpflow.placement.links import Links
from sbpflow.sbp.joint.move_cost import crossed, each_moved, local_bytes, moved
from sbpflow.sbp.joint.options import source_states
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.state import State

LINE, GRID = flow.placement("cpu", range(4)), flow.placement("cpu:[0-3] as (a=2, b=2)")
CPU = cluster("cpu")
NETWORKS = pytest.mark.parametrize("network", ["cpu", "flat", "two_level", "h100x8"])
EVEN, LARGE, UNEVEN = (48, 96), (1536, 3072), (33, 35)


def states(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[State]:
    """All without addends, and those with addends and maxima on any axes that split nothing."""
    found = source_states(shape, sizes, ())
    for state in list(found):
        free = [a for a in range(len(sizes)) if a not in state.split]
        for axes in (axes for n in range(1, len(free) + 1) for axes in combinations(free, n)):
            found += [state._replace(partial=axes), state._replace(partial=axes, reduction="max")]
    return found


def priced(
    place: flow.Placement, by: Cluster, shape: tuple[int, ...]
) -> Iterator[tuple[State, State, float, flow.boxing.Boxing]]:
    """Of all pairs of states the price by arithmetic, and the plan."""
    known = states(shape, place.shape)
    found = moved(known, known, shape, 4, Links.of(place, by))
    with use_cluster(by):
        for (i, a), (j, b) in product(enumerate(known), enumerate(known)):
            ends = (Layout(place, state, shape, torch.float32) for state in (a, b))
            yield a, b, float(found[i, j]), between(*ends)


@NETWORKS
@pytest.mark.parametrize("shape", [EVEN, LARGE], ids=str)
@pytest.mark.parametrize("place", ["cpu:[0-1]", "cpu:[0-2]", "cpu:[0-7]", "cpu:[0-63]"])
def test_on_one_axis_it_is_the_plans(place: str, shape: tuple[int, int], network: str) -> None:
    shape = shape if place != "cpu:[0-63]" else LARGE
    for src, dst, seconds, way in priced(flow.placement(place), cluster(network).with_node(64), shape):
        assert seconds == pytest.approx(way.price.time, rel=1e-9), (src, dst, way.route)


@NETWORKS
@pytest.mark.parametrize("place", ["cpu:[0-1]", "cpu:[0-2]", "cpu:[0-7]"])
def test_remainders_are_a_fifth_of_it_at_most(place: str, network: str) -> None:
    """Where ranks hold 5 of 33 rows; of 5 rows on 8 ranks it may be more."""
    for src, dst, seconds, way in priced(flow.placement(place), cluster(network), UNEVEN):
        assert 0.8 * way.price.time <= seconds <= 1.25 * way.price.time, (src, dst, way.route)


def test_what_a_card_adds_up_by_its_own_all_reduce_may_be_priced_at_half() -> None:
    """It is priced as if what is small were sent to everybody, which saves half of the hops."""
    for src, dst, seconds, way in priced(flow.placement("cuda:[0-7]"), cluster("h100x8"), EVEN):
        assert 0.5 * way.price.time <= seconds <= 1.000001 * way.price.time, (src, dst, way.route)


@pytest.mark.sampled(4)
@NETWORKS
@pytest.mark.parametrize("shape", [EVEN, UNEVEN], ids=str)
@pytest.mark.parametrize("place", ["cpu:[0-3] as (2, 2)", "cpu:[0-7] as (2, 4)", "cpu:[0-5] as (3, 2)"])
def test_on_two_axes_it_is_never_less_than_half_nor_more_than_the_links_differ(
    place: str, shape: tuple[int, int], network: str
) -> None:
    """Half where other cuts of one dim hang together. A route that lets an axis go early, or sends less over the slow
    link, is cheaper than axis by axis: at most by what one axis has in ranks, or the links in bandwidth."""
    where, by = flow.placement(place), cluster(network)
    by = by.with_node(2) if network == "two_level" else by
    rates = [by.link(where, (axis,))[1] for axis in range(2)]
    most = 1.1 * max(*where.shape, max(rates) / min(rates))
    for src, dst, seconds, way in priced(where, by, shape):
        assert (seconds == 0) == (way.price.time == 0), (src, dst)
        assert 0.45 * way.price.time <= seconds <= most * way.price.time, (src, dst, way.route)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shape", [(5, 7), (8, 16), (512, 1024)])
def test_the_order_of_prices_is_that_of_the_plans(shape: tuple[int, ...], ranks: int) -> None:
    each = list(priced(flow.placement("cpu", range(ranks)), CPU, shape))
    for (*one, a, way), (*other, b, other_way) in combinations(each, 2):
        if a < 0.95 * b:  # remainders are a few percent
            assert way.price.time <= 1.05 * other_way.price.time, (one, other)


def test_pairs_side_by_side_cost_what_they_cost_among_all() -> None:
    known, links = states(UNEVEN, GRID.shape), Links.of(GRID, CPU)
    held = local_bytes(known, UNEVEN, 4, GRID.shape).tolist()
    each = each_moved([(a, b, n) for (a, n), b in product(zip(known, held, strict=True), known)], links)
    assert np.array_equal(each, moved(known, known, UNEVEN, 4, links).reshape(-1))


def test_between_placements_a_byte_costs_at_least_its_way() -> None:
    other = flow.placement("cpu", range(4, 6))
    here, there = Links.of(LINE, CPU), Links.of(other, CPU)
    ends = [State(((), ()))], [State(((0,), ())), State(((), ()))]
    (row,) = crossed(*ends, (64, 64), 4, here, there, CPU.between(LINE, other))
    assert 0 < row[0] <= row[1]
