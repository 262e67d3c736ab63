"""Link graphs: rings of their own links, ways over others, and what cannot be."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import sbpflow as flow
from sbpflow.placement.errors import PlacementError
from sbpflow.placement.network.link_graph import LinkGraph, strides


def ring(size: int, *by: int) -> tuple[tuple[int, int], ...]:
    return tuple((k, (k + stride) % size) for stride in by for k in range(size))


def graph(*links: tuple[int, int]) -> LinkGraph:
    return LinkGraph(links, 1.0, 8.0)


def test_every_stride_with_links_of_its_own_is_one_more_ring() -> None:
    whole = [range(8)]
    assert graph(*ring(8, 1)).together(whole, "ring") == (1.0, 2 * 8.0)  # one each way round
    assert graph(*ring(8, 1, 3)).together(whole, "ring") == (1.0, 4 * 8.0)
    assert graph(*ring(8, 1, 1)).together(whole, "ring") == (1.0, 4 * 8.0)
    everybody = [(a, b) for a in range(8) for b in range(a)]
    assert graph(*everybody).together(whole, "ring") == (1.0, 4 * 8.0)  # by 1, 3, 5 and 7; by 2 there are two rings


def test_groups_that_work_at_once_share_links() -> None:
    pairs = [(k, k + 4) for k in range(4)]
    made = graph(*ring(8, 1))
    assert made.together(pairs, "ring") == (4.0, 8.0 / 4)  # four hops, and of eight ways of four links sixteen links
    assert made.together([(0, 4)], "ring") == (4.0, 8.0)
    assert graph(*ring(8, 1), *pairs).together(pairs, "ring") == (1.0, 8.0)
    assert made.together([range(4), range(4, 8)], "neighbours") == (3.0, 8.0)  # back to the first the way it came


def test_all_to_all_shares_the_links_of_shortest_ways() -> None:
    made = graph(*ring(4, 1))
    hops, rate = made.together([range(4)], "pairs")
    assert hops == 2.0
    assert rate == 8.0 * 3 / 3  # 4 x 1 + 4 x 1 + 4 x 2 steps over 8 ways, of which the busiest has 3
    full = graph(*[(a, b) for a in range(4) for b in range(a)])
    assert full.together([range(4)], "pairs") == (1.0, 8.0 * 3)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_receives_more_than_its_links_carry_and_ways_are_shortest(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randrange(3, 9)
    links = [(k, (k + 1) % size) for k in range(size)]
    links += [(a, b) for a in range(size) for b in range(a) if draw.random() < 0.3]
    made = graph(*links)
    degree = Counter(rank for link in links for rank in link)
    for ways in ("ring", "pairs", "neighbours"):
        members = draw.sample(range(size), draw.randrange(2, size + 1))
        _, rate = made.together([members], ways)
        assert 0 < rate <= 8.0 * max(degree[rank] for rank in members) * (1 + 1e-9)
    far = {0: 0}
    for _ in range(size):
        far |= {b: far[a] + 1 for a, b in made.ways if a in far and b not in far}
    for rank in range(1, size):
        assert made.between([0], [rank])[0] == far[rank]


def test_strides_get_round_all_members() -> None:
    for size in range(2, 20):
        for stride in strides(size):
            assert {k * stride % size for k in range(size)} == {*range(size)}


def test_a_cluster_of_links_is_written_and_read_and_prices_by_them(tmp_path: Path) -> None:
    known = replace(flow.cluster("h100x8"), name="rings", graph=graph(*ring(8, 1)))
    known.save(tmp_path / "rings.toml")
    read = flow.cluster(tmp_path / "rings.toml")
    assert read.graph == known.graph
    p = flow.placement("cuda:[0-7] as (2, 4)")
    assert read.link(p, (0,)) == (4.0, 2.0)
    assert read.link(p, (1,)) == known.link(p, (1,))
    assert read.between(flow.placement("cuda:[0]"), flow.placement("cuda:[3]")) == (3.0, 8.0)
    assert read.between(p, p)[1] == 8.0
    text = (tmp_path / "rings.toml").read_text()
    (tmp_path / "wrong.toml").write_text(text.replace("[[0, 1]", "[[0, 1, 2]"))
    with pytest.raises(PlacementError, match=r"are pairs of ranks, as in \[0, 1\]\n  found \[0, 1, 2\]"):
        flow.cluster(tmp_path / "wrong.toml")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlacementError, match="links are pairs of ranks"):
        graph((0, 0))
    with pytest.raises(PlacementError, match="links are pairs of ranks"):
        LinkGraph((), 1.0, 8.0)
    with pytest.raises(PlacementError, match="no way leads from rank 0 to rank 2"):
        graph((0, 1), (2, 3))
    with pytest.raises(PlacementError, match="rank 2 has no link in this cluster's graph"):
        graph((0, 1)).together([range(5)], "ring")
    with pytest.raises(PlacementError, match="rank 4 has no link"):
        graph((0, 1)).between([0], [4])
