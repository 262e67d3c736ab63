"""Clusters: a link is the outermost level that a group spans, and a change of cluster leaves none behind."""

import random
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from sbpflow.placement import (
    Calibration,
    Cluster,
    Device,
    Jitter,
    Level,
    MoveShares,
    PlacementError,
    RankDevice,
    RankLink,
    cluster,
    default_cluster,
    placement,
    use_cluster,
)
from sbpflow.placement.cluster import preset_here
from sbpflow.placement.links import Links
from sbpflow.placement.world import world

PRESETS = ("cpu", "a100x8", "h100x8", "h200x8", "flat", "two_level")
UNIT = Device("unit", {"float32": 1.0}, 1.0, 1.0)
TREE = Cluster("tree", (Level("pair", 2, 1.0, 8.0), Level("node", 3, 2.0, 4.0), Level("net", 4, 3.0, 2.0)), UNIT)

PLAIN = cluster("a100x8")  # without shares: all moves get all of a level's bandwidth
PLAIN = replace(PLAIN, levels=tuple(replace(level, shares=MoveShares()) for level in PLAIN.levels))

WAYS = ("ring", "sums", "pairs", "neighbours")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_slower_outward_and_price_any_axis(name: str) -> None:
    c = cluster(name)
    assert all(
        a.latency <= b.latency and a.bandwidth > b.bandwidth for a, b in zip(c.levels, c.levels[1:], strict=False)
    )
    whole = placement("cuda:[0-63] as (2, 4, 8)")
    last = c.levels[-1]
    assert c.link(whole, (0, 1, 2), "neighbours") == (last.latency, last.bandwidth * last.shares.hop)
    assert c.link(whole, (0, 1, 2))[0] == c.levels[-1].latency
    assert c.device.flops["float32"] <= c.device.flops.get("bfloat16", 0) or name == "cpu"
    assert cluster(name) is c


@pytest.mark.parametrize("seed", range(50))
def test_level_is_the_smallest_unit_that_holds_all_ranks(seed: int) -> None:
    dice = random.Random(seed)
    ranks = dice.sample(range(24), dice.randint(1, 6))
    units = (2, 6, 24)
    assert TREE.level_of(ranks) == next(k for k, size in enumerate(units) if len({r // size for r in ranks}) == 1)


def test_two_nodes_of_eight_pay_the_network_only_across() -> None:
    dgx = PLAIN
    across, inside = (4e-6, 20e9), (1.9e-6, 240e9)
    p = placement("cuda:[0-15] as (node=2, device=8)")
    assert [dgx.link(p, axes) for axes in ((0,), (1,), ())] == [across, inside, inside]


def test_cards_of_a_group_share_what_leaves_their_node() -> None:
    dgx = PLAIN
    p = placement("cuda:[0-15] as (node=2, device=8)")
    assert dgx.link(p, (0, 1)) == (4e-6, 8 * 20e9)  # a ring crosses by eight adapters at once
    assert dgx.link(p, (0, 1), "pairs") == (4e-6, 20e9 * 15 / 8)  # 8 of the 15 others are across
    assert dgx.link(p, (0, 1), "neighbours") == (4e-6, 20e9)  # of two neighbours one is across
    assert dgx.link(placement("cuda:[0-8]"), (0,)) == (4e-6, 20e9)  # the ninth has one
    whole = placement("cuda:[0-127] as (node=16, device=8)")
    assert dgx.link(whole, (0, 1)) == (4e-6, 160e9)
    mixed = placement("cuda:[0, 8, 1, 2] as (2, 2)")
    assert dgx.link(mixed, (1,)) == (4e-6, 20e9)  # beside a group that stays inside
    on_hosts = placement("cpu:[0-15] as (node=2, device=8)")
    assert dgx.link(on_hosts, (0, 1)) == across_of(dgx)  # hosts' ranks go in steps, see Links.stepwise


def across_of(c: Cluster) -> tuple[float, float]:
    return c.levels[-1].latency, c.levels[-1].bandwidth


def test_each_level_of_a_tree_is_as_wide_as_the_cards_below_it() -> None:
    p = placement("cuda:[0-23]")
    assert TREE.link(p, (0,)) == (3.0, min(8.0, 2 * 4.0, 6 * 2.0))
    assert TREE.link(p, (0,), "pairs") == (3.0, min(8.0, 4.0 * 23 / 22, 2.0 * 23 / 18))


def test_one_group_that_leaves_its_node_prices_the_axis() -> None:
    p = placement("cuda:[0-3, 4-6, 8] as (2, 4)")
    assert cluster("two_level").link(p, (1,)) == (0.0, 0.125)


@pytest.mark.parametrize("seed", range(8))
def test_a_link_goes_by_all_groups_of_which_only_unlike_ones_are_looked_at(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    shape = rng.choice([(2, 4, 6), (6, 8), (4, 2, 2, 3), (48,), (16, 3)])
    ranks = rng.choice([list(range(48)), list(range(5, 53)), rng.sample(range(64), 48)])
    axes = [each for many in range(1, len(shape) + 1) for each in combinations(range(len(shape)), many)]
    tree = Cluster("tree", tuple(Level(f"{n}", n, float(n), 10.0 - n) for n in (3, 4, 6)), UNIT)
    asked = [(of, each, ways) for of in (cluster("h100x8*8"), tree) for each in axes for ways in WAYS]

    def found() -> list[tuple[float, float]]:
        grid = placement("cuda", ranks).reshape(shape)
        return [of.link(grid, each, ways) for of, each, ways in asked]

    few = found()
    monkeypatch.setattr(sys.modules[Cluster.__module__], "unlike_groups", lambda groups, units: groups)
    assert few == found()


def test_a_change_of_cluster_leaves_no_old_link() -> None:
    p = placement("cpu:[0-15] as (2, 8)")
    wide = cluster("two_level")
    assert wide.link(p, (0,)) == (0.0, 0.125)
    assert wide.with_node(16).link(p, (0,)) == (0.0, 1.0)
    assert [replace(wide, name=str(k)).with_node(2 ** (3 + k % 2)).link(p, (0,))[1] for k in range(6)] == [
        0.125,
        1.0,
    ] * 3


def test_links_are_remembered_on_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    p = placement("cpu:[0-15] as (2, 8)")
    first = TREE.link(p, (1,))
    monkeypatch.setattr(Cluster, "level_of", None)
    assert TREE.link(p, (1,)) is first


def test_clusters_compare_and_hash_by_identity() -> None:
    assert replace(TREE) != TREE
    assert Cluster.__hash__ is object.__hash__


@pytest.mark.parametrize("name", [*PRESETS, "odd"])
def test_saved_clusters_read_back(name: str, tmp_path: Path) -> None:
    odd = Cluster('o"d\\d é', (Level("x", 3, 0.0, float("inf")),), Device("a.b", {"float8 x": 1e-9}, 1, 2.5e30))
    c = odd if name == "odd" else cluster(name)
    c.save(tmp_path / "c.toml")
    read = cluster(tmp_path / "c.toml")
    assert repr(read) == repr(cluster(str(tmp_path / "c.toml"))) == repr(replace(c, origin=read.origin))
    assert read.said == f"as {tmp_path / 'c.toml'} has it"


@pytest.fixture
def unused() -> Iterator[None]:
    yield
    use_cluster(None)


@pytest.mark.usefixtures("unused")
def test_use_cluster_lasts_until_it_is_ended() -> None:
    use_cluster("flat")
    assert default_cluster(placement("cuda", 0)) is default_cluster("cpu") is cluster("flat")
    use_cluster(None)
    assert default_cluster(placement("cpu", 0)) is cluster("cpu")


def test_use_cluster_ends_with_its_block(tmp_path: Path) -> None:
    TREE.save(tmp_path / "tree.toml")
    with use_cluster(TREE):
        with use_cluster(tmp_path / "tree.toml"):
            assert default_cluster("cpu").name == "tree"
            assert default_cluster("cpu") is not TREE
        assert default_cluster("cpu") is TREE
        with pytest.raises(PlacementError), use_cluster("flat"):
            cluster("none")
        assert default_cluster("cpu") is TREE
    assert default_cluster("cpu") is cluster("cpu")


@pytest.mark.parametrize(
    ("gpu", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100x8"),
        ("NVIDIA H100 80GB HBM3", "h100x8"),
        ("NVIDIA H200", "h200x8"),
        ("NVIDIA B200", "b200x8"),
        ("NVIDIA GB200", "gb200x72"),
        ("Tesla V100-SXM2-32GB", "v100x8"),
        ("NVIDIA GeForce RTX 4090", "h100x8"),
        (None, "h100x8"),
    ],
)
def test_cuda_placements_are_priced_by_the_gpu_at_hand(
    gpu: str | None, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(world(), "clusters", {})
    preset_here.cache_clear()
    assert default_cluster(placement("cuda", 0)) is cluster(preset)
    preset_here.cache_clear()


GOOD = """
name = "mine"
levels = [{ name = "host", size = 8, latency = 1e-6, bandwidth = 1e9 }]
device = { name = "x", memory = 1, memory_bandwidth = 1, flops = { float32 = 1 } }
"""
LEVEL = "\n  size is a whole number from 1, latency seconds from 0, bandwidth bytes/s above 0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "size = 8",
            "sise = 8",
            "level 0 of FILE needs name, size, latency, bandwidth, groups, shares\n  found missing size; unknown sise",
        ),
        ('name = "mine"', "", "FILE needs name, levels, device, links, devices, origin, graph\n  found missing name"),
        ("1e9", "'fast'", "bandwidth in level 0 of FILE is a number\n  found 'fast'"),
        ("float32 = 1", "float32 = 'x'", "flops in device of FILE is a number\n  found {'float32': 'x'}"),
        (
            "size = 8",
            "size = 8.0",
            "level 'host' cannot be\n"
            "  found Level(name='host', size=8.0, latency=1e-06, bandwidth=1000000000.0)" + LEVEL,
        ),
        (
            "1e9",
            "0.0",
            "level 'host' cannot be\n  found Level(name='host', size=8, latency=1e-06, bandwidth=0.0)" + LEVEL,
        ),
        (
            GOOD,
            "name = 'x'\nlevels = []\ndevice = { name = 'x', memory = 1, memory_bandwidth = 1, flops = {} }",
            "cluster 'x' has no levels\n  give at least one: Level(name, size, ...)",
        ),
        (
            GOOD,
            "name = 'x'\nlevels = 3\ndevice = { name = 'x', memory = 1, memory_bandwidth = 1, flops = {} }",
            "levels of FILE are written as [[levels]]\n  found 3",
        ),
        (
            GOOD,
            "name = 'x'\nlevels = []\ndevice = 3",
            "device of FILE is a table of name, flops, memory, memory_bandwidth, host_bandwidth, disk_bandwidth, type, "
            "fitted, jitter\n"
            "  found 3",
        ),
    ],
)
def test_a_file_that_does_not_fit_says_where(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(PlacementError) as refused:
        cluster(path)
    assert str(refused.value).replace(f"cluster file {str(path)!r}", "FILE") == message


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: cluster("h10"),
            "no cluster is called 'h10'\n"
            "  known are cpu, a100x8, h100x8, h200x8, v100x8, gb200x72, b200x8, flat, two_level\n"
            "  a description of your own is a file, cluster('mine.toml')\n"
            "  did you mean 'h100x8'?",
        ),
        (lambda: cluster("no.toml"), "cannot read cluster file 'no.toml'\n  found No such file or directory"),
        (
            lambda: TREE.level_of([3, 24]),
            "rank 24 is beyond cluster 'tree'\n  2 (pair) x 3 (node) x 4 (net) hold ranks 0 to 23\n"
            "  use a cluster with a larger top level, use_cluster(...)",
        ),
        (lambda: TREE.link(placement("cpu:[20-27]"), (0,)), "rank 27 is beyond cluster 'tree'\n  2 (pair) x"),
    ],
)
def test_refusals_say_what_was_asked_and_found(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(PlacementError, match="^" + re.escape(message)):
        ask()


def test_a_file_that_is_no_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("name =")
    with pytest.raises(PlacementError, match=r"cluster file '.*c.toml' is not TOML\n  found Invalid value"):
        cluster(tmp_path / "c.toml")


def test_what_is_saved_is_plain_toml(tmp_path: Path) -> None:
    TREE.save(tmp_path / "c.toml")
    table = tomllib.loads((tmp_path / "c.toml").read_text())
    assert table["levels"][1] == {"name": "node", "size": 3, "latency": 2.0, "bandwidth": 4.0}


FITTED = Calibration(0.75, 0.5, 2e-6, "here", 0.04, attention=0.25)
LINKED = replace(
    TREE,
    links=(RankLink((0, 1), 5.0, 0.5), RankLink((1, 2), 0.5, 16.0)),
    devices=(RankDevice((1, 3), Device("other", {"float32": 0.5, "int8": 4.0}, 2.0, 3.0, fitted=FITTED)),),
)


def test_two_ranks_pay_for_the_link_that_is_theirs() -> None:
    ranks = [placement("cpu", [n]) for n in range(4)]
    assert LINKED.between(ranks[0], ranks[1]) == LINKED.between(ranks[1], ranks[0]) == (5.0, 0.5)
    assert LINKED.between(ranks[1], ranks[2]) == (0.5, 16.0)  # quicker than that of the node
    assert LINKED.between(ranks[0], ranks[2]) == (2.0, 4.0)
    assert LINKED.link(placement("cpu", range(2)), (0,)) == (5.0, 0.5)
    assert LINKED.link(placement("cpu", range(1, 3)), (0,)) == (0.5, 16.0)


def test_many_ranks_pay_for_the_slowest_link_between_two_of_them() -> None:
    assert LINKED.link(placement("cpu", range(1, 4)), (0,)) == (2.0, 4.0)  # others go by the level
    assert LINKED.link(placement("cpu", range(4)), (0,)) == (5.0, 0.5)
    assert LINKED.between(placement("cpu", [0, 2]), placement("cpu", [1])) == (5.0, 0.5)
    assert LINKED.between(placement("cpu", [0, 2]), placement("cpu", [3])) == (2.0, 4.0)
    assert TREE.link(placement("cpu", range(4)), (0,)) == (2.0, 4.0)


def test_ranks_wait_for_the_least_of_their_devices() -> None:
    other = LINKED.devices[0].device
    assert LINKED.device_of(placement("cpu", [0, 2])) is UNIT
    assert LINKED.device_of(placement("cpu", [1, 3])) is other
    both = LINKED.device_of(placement("cpu", range(4)))
    assert (both.flops, both.memory, both.memory_bandwidth) == ({"float32": 0.5, "int8": 1.0}, 1.0, 1.0)


def test_unlike_links_and_devices_are_written_and_read(tmp_path: Path) -> None:
    LINKED.save(tmp_path / "c.toml")
    again = cluster(tmp_path / "c.toml")
    assert (again.levels, again.device) == (LINKED.levels, LINKED.device)
    assert (again.links, again.devices) == (LINKED.links, LINKED.devices)


def test_ranks_wait_for_the_least_of_what_is_fitted() -> None:
    slow = replace(UNIT, name="slow", fitted=replace(FITTED, product=0.5, launch=1e-6, error=0.1, attention=None))
    both = replace(LINKED, devices=(*LINKED.devices, RankDevice((0,), slow))).device_of(placement("cpu", range(4)))
    assert both.fitted == Calibration(0.5, 0.5, 2e-6, "here", 0.1, attention=0.25)


@pytest.mark.parametrize("name", ["h200x8", "b200x8", "gb200x72"])
def test_a_device_of_which_nobody_published_steps_is_a_datasheet(name: str) -> None:
    device = cluster(name).device
    assert device.said == f"{device.name}: datasheet, not calibrated"


def test_a_fitted_device_says_where_and_how_well() -> None:
    said = "A100: fitted, on published steps of transformers on A100, median error 5.1 %"
    assert cluster("a100x8").device.said == said


SHARED = replace(
    PLAIN,
    levels=(
        replace(PLAIN.levels[0], shares=MoveShares(gather=0.5, sum=0.25)),
        replace(PLAIN.levels[1], shares=MoveShares(0.8, 0.4, 0.2)),
    ),
)


@pytest.mark.parametrize("type", ["cuda", "cpu"])
def test_moves_get_the_share_of_their_kind(type: str) -> None:
    both = placement(f"{type}:[0-15] as (node=2, device=8)")
    links = Links.of(both, SHARED)
    across, inside = 1e9 / 20e9, 1e9 / 240e9
    for kind, network, node in (("all_gather", 0.4, 0.5), ("reduce_scatter", 0.2, 0.25), ("all_reduce", 0.2, 0.25)):
        hops = 2 if kind == "all_reduce" else 1
        assert links.seconds(kind, (0,), 1e9) == pytest.approx(hops * 4e-6 + across / network)
        assert links.seconds(kind, (1,), 1e9) == pytest.approx(hops * 3 * 1.9e-6 + inside / node)
    assert links.seconds("halo", (0,), 1e9) == pytest.approx(4e-6 + across / 0.8)
    assert links.seconds("all_to_all", (0,), 1e9) == pytest.approx(4e-6 + across / 0.4)
    assert links.ring((0,)) == (4e-6, 20e9 * 0.4)  # the quicker of gathers and sums: a bound of both
    ends = placement(type, range(8)), placement(type, range(8, 16))
    assert SHARED.between(*ends) == (4e-6, 20e9 * 0.8)


def test_a_group_over_levels_pays_the_slowest_share_of_its_kind() -> None:
    both = placement("cuda:[0-15] as (node=2, device=8)")
    assert SHARED.link(both, (0, 1), "sums") == (4e-6, 8 * 20e9 * 0.2)
    assert SHARED.link(both, (0, 1), "ring") == (4e-6, 8 * 20e9 * 0.4)
    slow = replace(SHARED, levels=(replace(SHARED.levels[0], shares=MoveShares(sum=0.01)), SHARED.levels[1]))
    assert slow.link(both, (0, 1), "sums") == (4e-6, 240e9 * 0.01)


def test_shares_are_written_and_read(tmp_path: Path) -> None:
    SHARED.save(tmp_path / "c.toml")
    assert cluster(tmp_path / "c.toml").levels == SHARED.levels
    PLAIN.save(tmp_path / "c.toml")
    assert "shares" not in (tmp_path / "c.toml").read_text()


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "{ sum = 1.5 }",
            "shares of a level cannot be: sum = 1.5\n  a share of its bandwidth is above 0 and at most 1",
        ),
        ("{ hop = 0 }", "shares of a level cannot be: hop = 0\n"),
        ("{ gathers = 0.5 }", "needs hop, gather, sum\n  found unknown gathers"),
        ("{ hop = 'all' }", "hop in shares in level 0 of FILE is a number\n  found 'all'"),
        ("3", "is a table of hop, gather, sum\n  found 3"),
    ],
)
def test_shares_that_cannot_be_say_where(said: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(GOOD.replace("bandwidth = 1e9", f"bandwidth = 1e9, shares = {said}"), encoding="utf-8")
    with pytest.raises(PlacementError) as refused:
        cluster(path)
    found = str(refused.value).replace(f"cluster file {str(path)!r}", "FILE")
    assert message in found
    assert "shares in level 0 of FILE" in found


UNEVEN = Jitter(0.03, slow=0.2, one_in=1000, seed=7)


def test_how_unevenly_devices_compute_is_written_and_read(tmp_path: Path) -> None:
    for given in (UNEVEN, Jitter(0.03)):
        LINKED.with_jitter(given).save(tmp_path / "c.toml")
        again = cluster(tmp_path / "c.toml")
        assert again.device.jitter == again.devices[0].device.jitter == given
    assert (again.with_jitter(None).device, again.with_jitter(None).devices) == (LINKED.device, LINKED.devices)


def test_who_waits_for_unlike_devices_has_the_most_of_their_jitter() -> None:
    assert LINKED.device_of(placement("cpu", range(4))).jitter is None
    other = RankDevice((1, 3), replace(UNIT, name="other", jitter=Jitter(0.05)))
    mixed = replace(LINKED, device=replace(UNIT, jitter=UNEVEN), devices=(other,))
    assert mixed.device_of(placement("cpu", range(4))).jitter == replace(UNEVEN, scatter=0.05)
    assert mixed.device_of(placement("cpu", [1])).jitter == Jitter(0.05)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("scatter = -0.1", "scatter = -0.1\n  a share from 0 to 1, as in scatter = 0.03 (3 % of a task)"),
        ("scatter = 3", "scatter = 3\n  a share from 0 to 1, as in scatter = 0.03"),
        ("slow = -1", "slow = -1\n  0 or more, as in slow = 0.2 (20 % longer)"),
        ("slow = 0.2", "slow = 0.2 alone\n  say both how many cards have one slow one and by what share, as in one_in"),
        ("one_in = 100", "one_in = 100 alone\n  say both how many cards have one slow one"),
        ("one_in = 0", "one_in = 0\n  cards of which one is slow, 1 or more, as in one_in = 1000"),
        ("seed = 1.5", "seed = 1.5\n  a whole number from 0, as in seed = 0"),
        ("scatter = 'much'", "scatter in jitter in device of FILE is a number\n  found 'much'"),
        ("scater = 0.1", "needs scatter, slow, one_in, seed\n  found unknown scater"),
    ],
)
def test_a_jitter_that_cannot_be_says_where(said: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    TREE.save(path)
    path.write_text(f"{path.read_text()}\n[device.jitter]\n{said}\n", encoding="utf-8")
    with pytest.raises(PlacementError) as refused:
        cluster(path)
    found = str(refused.value).replace(f"cluster file {str(path)!r}", "FILE")
    assert message in found
    assert "jitter in device of FILE" in found


SHARE = "\n  a share of the datasheet's figure is above 0 and at most 1, as in "


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("product = 0.75", "product = 1.5", f"cannot be: product = 1.5{SHARE}product = 0.78"),
        ("functions = 1.0", "functions = 0.5", "cannot be: functions = 0.5\n"),
        ("functions = 1.0", "update = 0.0", "cannot be: update = 0.0\n  how many times as long as a sum of as many"),
        ("attention = 0.25", "attention = 0", f"cannot be: attention = 0{SHARE}attention = 0.78"),
        ("launch = 2e-06", "launch = -1", "cannot be: launch = -1\n  0 or more, as in launch = 3e-6 (seconds of"),
        ("launch = 2e-06", "launch = 'short'", "launch in fitted in a device of FILE is a number\n  found 'short'"),
        ("error = 0.04", "", "found missing error"),
        ("error = 0.04", "error = 0.04\nshare = 1", "found unknown share"),
    ],
)
def test_constants_that_do_not_fit_say_where(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    LINKED.save(path)
    path.write_text(path.read_text().replace(old, new), encoding="utf-8")
    with pytest.raises(PlacementError) as refused:
        cluster(path)
    said = str(refused.value).replace(f"cluster file {str(path)!r}", "FILE")
    assert message in said
    assert "fitted in a device of FILE" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[[links]]\nranks = [1, 1]\nlatency = 0\nbandwidth = 1", "a link cannot be\n  found RankLink(ranks=(1, 1)"),
        ("[[links]]\nranks = 3\nlatency = 0\nbandwidth = 1", "ranks in FILE are a list, as in [1, 2]\n  found 3"),
        ("[[links]]\nranks = [1, 2]\nbandwidth = 1", "link 0 of FILE needs ranks, latency, bandwidth\n  found missing"),
        ("[links]\nranks = [1, 2]", "links of FILE are written as [[links]]\n  found {'ranks': [1, 2]}"),
        ("[[devices]]\nranks = []\ndevice = 3", "a device of FILE is a table of name"),
    ],
)
def test_an_unlike_link_or_device_that_does_not_fit_says_where(more: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"{GOOD}\n{more}\n", encoding="utf-8")
    with pytest.raises(PlacementError) as refused:
        cluster(path)
    assert str(refused.value).replace(f"cluster file {str(path)!r}", "FILE").startswith(message)
