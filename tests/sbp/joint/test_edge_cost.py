"""Placements on which everything costs the same are worked out once, whatever ranks they have."""

import pytest
import torch

import sbpflow as flow
from sbpflow.placement import Cluster, Placement, cluster
from sbpflow.placement.links import Links
from sbpflow.sbp.joint.demands import Demands
from sbpflow.sbp.joint.edge_cost import Carried, EdgeCosts
from sbpflow.sbp.joint.move_cost import crossed, moved
from sbpflow.sbp.state import State

NODES = cluster("h100x8*4")


def place(ranks: range, *shape: int) -> Placement:
    return flow.placement("cuda", ranks).reshape(shape, ("data", "tensor")[: len(shape)])


def costs(of: Cluster = NODES) -> EdgeCosts:
    return EdgeCosts(lambda there: of, Demands())


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (place(range(8), 2, 4), place(range(8, 16), 2, 4), True),  # a node each
        (place(range(16), 2, 8), place(range(16, 32), 2, 8), True),  # two nodes each
        (place(range(4), 4), place(range(20, 24), 4), True),
        (place(range(4), 4), place(range(6, 10), 4), False),  # over a node's end
        (place(range(8), 2, 4), place(range(8, 16), 4, 2), False),
        (place(range(8), 2, 4), place(range(0, 32, 4), 2, 4), False),
    ],
)
def test_stages_are_alike_whose_links_are(one: Placement, other: Placement, alike: bool) -> None:
    of = costs()
    assert of.alike(one) is one
    assert of.alike(other) is (one if alike else other)
    assert (Links.of(one, NODES).figures == Links.of(other, NODES).figures) is alike


def test_gradients_that_go_at_once_and_other_devices_keep_them_apart() -> None:
    one, other = place(range(8), 8), place(range(8, 16), 8)
    of = EdgeCosts(lambda there: NODES, Demands(), {one: 1e6, other: 2e6})
    assert of.alike(other) is of.alike(other) is other
    assert of.alike(one) is one
    slow = EdgeCosts(lambda there: NODES if there is one else cluster("a100x8*4"), Demands())
    assert slow.alike(one) is one
    assert slow.alike(other) is other


def carried(here: Placement, there: Placement, shape: tuple[int, ...]) -> Carried:
    return Carried(shape, torch.bfloat16, here, there, grad=False, again=False, lasts=False, hides=False)


def test_what_ranks_have_already_goes_nowhere_between_two_grids_of_them() -> None:
    """As experts see ranks of data; other pieces cost what they cost on the finer grid."""
    data = place(range(16), 16)
    folded = data.folded("data", "expert", 4)
    of, links = costs(), Links.of(folded, NODES)
    src = [State(((0,), ())), State(((), ())), State(((), ()), (0,))]
    dst = [State(((0, 1), ())), State(((0,), (1,))), State(((), ()))]
    for shape, even in (((64, 32), True), ((68, 32), False)):
        there, back = carried(data, folded, shape), carried(folded, data, shape)
        cost = of._moved(src, dst, there, 2)[1]
        fine = [State(((0, 1), ())), State(((), ())), State(((), ()), (0, 1))]
        wanted = moved(fine, dst, shape, 2, links)
        across = crossed(src, dst, shape, 2, Links.of(data, NODES), links, NODES.between(data, folded))
        assert (cost[1:] == wanted[1:]).all()
        assert (cost[0] == (wanted if even else across)[0]).all()
        assert bool(cost[0, 0] == 0) is even
        assert ((of._moved(dst, src, back, 2)[1] == moved(dst, fine, shape, 2, links))[:, 1:]).all()
    elsewhere = place(range(16, 32), 16)
    assert of._moved(src, dst, carried(elsewhere, folded, (64, 32)), 2)[1].min() > 0


def test_edges_between_grids_of_a_stage_are_alike_where_stages_are() -> None:
    of = costs()
    one, other, odd = (place(range(first, first + 8), 8) for first in (0, 8, 20))
    first = of.like(carried(one, one.folded("data", "expert", 4), (64, 32)))
    assert of.like(carried(other, other.folded("data", "expert", 4), (64, 32))) == first
    assert of.like(carried(odd, odd.folded("data", "expert", 4), (64, 32))) != first  # over a node's end
    apart = carried(one, other, (64, 32))
    assert of.like(apart) == apart
