"""Levels out of measured pairs: groups where wires differ, listed units where hosts do, and routes that follow."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from sbpflow.boxing import between
from sbpflow.placement import Cluster, Level, PlacementError, cluster, placement, use_cluster
from sbpflow.placement.measure import LinkTimes
from sbpflow.placement.network.hosts import Hosts
from sbpflow.placement.network.levels import PairLink
from sbpflow.placement.network.pairs import rounds
from sbpflow.sbp import layout

FAST, SLOW = 25e6, 6.25e6  # bytes per second


def found(hosts: Hosts, wires: dict[tuple[int, int], float]) -> Cluster:
    """The cluster of hosts whose pairs have these wires."""
    most = {pair: min(len(hosts.members(host)) for host in pair) for pair in wires}
    inside = [PairLink((host,), 1e-4, 1e9, 1) for host in range(hosts.count)]
    links = [PairLink(pair, 3e-4, wire / most[pair], most[pair]) for pair, wire in wires.items()]
    return LinkTimes(hosts, tuple("abcd"[: hosts.count]), (*inside, *links), when="today").cluster()


def test_two_hosts_are_two_levels_whose_ranks_share_a_wire() -> None:
    inside, network = found(Hosts((0, 0, 1, 1)), {(0, 1): FAST}).levels
    assert (inside.size, inside.bandwidth, inside.groups) == (2, 1e9, ())
    assert (network.name, network.bandwidth, network.latency) == ("network", FAST / 2, 3e-4)


def test_a_thin_trunk_makes_groups_of_hosts() -> None:
    wires = {pair: FAST if pair in ((0, 1), (2, 3)) else SLOW for pair in combinations(range(4), 2)}
    made = found(Hosts((0, 0, 1, 1, 2, 2, 3, 3)), wires)
    assert [(level.name, level.size, level.bandwidth) for level in made.levels[1:]] == [
        ("group 1", 2, FAST / 2),
        ("network", 4096, SLOW / 2),
    ]
    assert [made.level_of(ranks) for ranks in ((0, 1), (0, 2), (2, 4), (5, 7))] == [0, 1, 2, 1]


def test_hosts_in_any_order_and_of_any_number_are_listed(tmp_path: Path) -> None:
    made = found(Hosts((0, 1, 0, 2, 1, 0)), {(0, 1): FAST, (0, 2): SLOW, (1, 2): SLOW})
    made.save(tmp_path / "links.toml")
    read = cluster(tmp_path / "links.toml")
    assert [level.groups for level in read.levels] == [((0, 2, 5), (1, 4), (3,)), ((0, 1, 2, 4, 5), (3,)), ()]
    assert [read.level_of(ranks) for ranks in ((0, 5), (0, 1), (3, 5))] == [0, 1, 2]
    assert read.said == f"measured today on a (3), b (2), c (1), file {tmp_path / 'links.toml'}"
    with pytest.raises(PlacementError, match="rank 6 is beyond cluster 'measured'"):
        read.level_of((0, 6))


def test_a_pair_that_is_slower_than_those_around_it_has_links_of_its_own() -> None:
    made = found(Hosts((0, 1, 2)), {(0, 1): FAST, (1, 2): FAST, (0, 2): SLOW})
    assert [(link.ranks, link.bandwidth) for link in made.links] == [((0, 2), SLOW)]
    p = placement("cpu", range(3))
    assert made.between(p.reshape((3,)), p)[1] == SLOW
    assert made.link(placement("cpu", [0, 1]), (0,))[1] == FAST


def test_groups_that_an_outer_level_cuts_are_refused() -> None:
    levels = (
        Level("host", 2, 0, 1, ((0, 1), (2, 3))),
        Level("group", 2, 0, 1, ((0, 2), (1, 3))),
        Level("net", 2, 0, 1),
    )
    with pytest.raises(PlacementError, match="groups of level 'group' hold those of 'host' whole"):
        Cluster("cut", levels, cluster("cpu").device)
    with pytest.raises(PlacementError, match="each rank stands in one of them"):
        Level("host", 2, 0, 1, ((0, 1), (1, 2)))


@pytest.mark.parametrize("counts", [(2, 2), (3, 1, 2), (1, 1, 1), (4,), (2, 1, 2, 2, 1)])
def test_every_two_hosts_meet_once_and_nobody_is_in_two_pairs(counts: tuple[int, ...]) -> None:
    hosts = Hosts(tuple(host for host, many in enumerate(counts) for _ in range(many)))
    every = list(rounds(hosts))
    for units in every:
        ranks = [rank for unit in units for pair in unit.pairs for rank in pair]
        assert len(ranks) == len({*ranks})
        assert all(unit.pairs for unit in units)
    between = sorted(unit.hosts for units in every for unit in units if len(unit.hosts) == 2)
    assert between == sorted(combinations(range(len(counts)), 2))


def test_a_sum_crosses_hosts_once_where_their_links_were_measured() -> None:
    """Over loopback for all, one all_reduce of all ranks is cheapest; over the measured wires it is made in two."""
    p = placement("cpu:[0-3] as (host=2, rank=2)")
    src = layout(p, "(P, P)", (1024, 1024))
    by = {}
    for name, prices in (("preset", cluster("cpu")), ("measured", found(Hosts((0, 0, 1, 1)), {(0, 1): FAST}))):
        with use_cluster(prices):
            way = between(src, src.to("(B, B)"))
        by[name] = sum(move.price.bytes for move in way.moves if 0 in move.axes), way.route
    assert by["preset"][1] != by["measured"][1]
    assert by["measured"][0] < by["preset"][0]


def test_a_file_of_other_hosts_says_so() -> None:
    from sbpflow.placement.cluster import _checked
    from sbpflow.placement.network.hosts import RunHosts
    from sbpflow.placement.network.wire import Interface

    made = found(Hosts((0, 0, 1, 1)), {(0, 1): FAST})
    run = RunHosts(Hosts((0, 1, 1)), ("a", "b"), (Interface("", 0.0),) * 2)
    assert _checked(made, run).said.endswith("but hosts of this run have 1 + 2 ranks: measure again")
    assert _checked(made, replace(run, hosts=Hosts((0, 0, 1, 1)))).said == made.said
