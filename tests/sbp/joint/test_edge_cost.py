"""Placements on which everything costs the same are worked out once, whatever ranks they have."""

import pytest

import sbpflow as flow
from sbpflow.placement import Cluster, Placement, cluster
from sbpflow.placement.links import Links
from sbpflow.sbp.joint.demands import Demands
from sbpflow.sbp.joint.edge_cost import EdgeCosts

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
