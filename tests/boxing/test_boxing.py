"""Plans: made by little work, remembered, printed; what is sent is what was planned, also between placements."""

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

import pytest
import torch

import sbpflow as flow
from sbpflow.boxing import Boxing, between, box
from sbpflow.boxing.exchange.execute import transport
from sbpflow.boxing.routes import missing, program, route
from sbpflow.placement import Placement, cluster, placement, use_cluster
from sbpflow.placement.errors import SbpError
from sbpflow.sbp import B, Layout, P, S, Sbp, layout, state
from tests.boxing.oracle import (
    GRIDS,
    SHAPES,
    Pair,
    assert_means,
    broken,
    drawn,
    every_pair,
    grid,
    held,
    holed,
    network,
    ordered,
    public,
    sample,
)
from tests.counts import calls

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
OF_ALL_SIZES = pytest.mark.parametrize("size", SHAPES)
ON_NETWORKS = pytest.mark.parametrize("prices", ["cpu", "flat", "two_level"])
MODULES = (state, missing, program, route)


# What is sent


def sends_what_it_planned(src: Layout, dst: Layout) -> None:
    """In value, in bytes of each rank, and in messages."""
    shards, whole = drawn(src, (src.lie, dst.lie))
    sent = transport().sent
    bytes_, calls = sent.bytes.copy(), sent.calls.copy()
    out, way = box(shards, src, dst), between(src, dst)
    assert_means(out, dst, whole)
    grew = {r: sent.bytes[r] - bytes_[r] for r in way.ranks}
    assert grew == {r: way.sent(r) for r in way.ranks}, f"{grew} in {way}"
    assert sum(grew.values()) == way.total == sum(map(way.received, way.ranks)), f"{way}"
    assert sent.calls - calls == Counter({r: messages(way, r) for r in way.ranks if messages(way, r)}), f"{way}"


def messages(way: Boxing, rank: int) -> int:
    return sum(len(one.sends) for own in way.programs(rank) for one in own)


@pytest.mark.sampled(7)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@ON_NETWORKS
def test_the_transport_counts_what_the_plan_said(axes: tuple[int, ...], size: str, prices: str) -> None:
    pairs = every_pair(public(grid(*axes), SHAPES[size]))
    with use_cluster(network(prices, axes)):
        chosen = sample(pairs, 40 if len(axes) < 3 else 15, (axes, size, prices))
        assert broken(chosen, sends_what_it_planned) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_the_transport_counts_what_every_plan_said(axes: tuple[int, ...], size: str) -> None:
    layouts = [*ordered(grid(*axes), SHAPES[size]), *holed(grid(*axes), SHAPES[size])]
    with use_cluster("flat"):
        assert broken(sample(every_pair(layouts), 3000, (axes, size)), sends_what_it_planned) == []


@pytest.mark.sampled(8)
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_what_one_rank_sends_another_receives(axes: tuple[int, ...], size: str) -> None:
    pairs = every_pair(ordered(grid(*axes), SHAPES[size]))
    with use_cluster("flat"):
        assert broken(sample(pairs, 40, (axes, size)), agrees_on_every_message) == []


def agrees_on_every_message(src: Layout, dst: Layout) -> None:
    way = between(src, dst)
    for step in range(len(way.moves)):
        own = {r: way.programs(r)[step] for r in way.ranks}
        for i in range(max(map(len, own.values()))):
            sent = {(r, part.peer): part.boxes for r, one in own.items() if one for part in one[i].sends}
            got = {(part.peer, r): part.boxes for r, one in own.items() if one for part in one[i].receives}
            assert sent == got, f"{way}"
            assert not any(a == b for a, b in sent), f"a rank writes to itself in {way}"


# How much work it takes


def forget() -> None:
    """Empty what the planner remembers between plans."""
    for module in MODULES:
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def cold(src: Layout, dst: Layout) -> int:
    """Calls to plan a pair for the first time."""
    src.memo.clear()
    forget()
    return calls(lambda: between(src, dst))


AXES = {(2, 2): 40_000, (2, 4): 40_000, (4, 4): 40_000, (2, 2, 2): 400_000}  # where two levels differ; else a third


@pytest.mark.sampled(8)
@ON_NETWORKS
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("shape", [(48, 96), (33, 35)], ids=str)
def test_a_plan_takes_so_many_calls_at_most(axes: tuple[int, ...], shape: tuple[int, ...], prices: str) -> None:
    pairs = sample(every_pair(public(grid(*axes), shape)), 12, (axes, prices))
    with use_cluster(network(prices, axes)):
        assert max(cold(*pair) for pair in pairs) <= AXES[axes]


@pytest.mark.sweep
@ON_NETWORKS
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_any_plan_takes_so_many_calls_at_most(axes: tuple[int, ...], prices: str) -> None:
    pairs = list(every_pair(public(grid(*axes), (48, 96))))
    with use_cluster(network(prices, axes)):
        assert max(cold(*pair) for pair in sample(pairs, 500)) <= AXES[axes]


def test_a_plan_made_before_is_found_and_not_made_again() -> None:
    src, dst = layout(grid(2, 2), (S(0), P), (48, 96)), layout(grid(2, 2), (B, S(1)), (48, 96))
    flow.init()
    between(src, dst)
    assert calls(lambda: between(src, dst)) <= 9  # one of them asks for the world, whose links price it


def test_a_large_grid_plans_in_as_many_calls_as_a_small_one() -> None:
    """The search sees axes, not ranks."""
    small, large = (
        median(cold(*pair) for pair in sample(every_pair(public(grid(*axes), (512, 1024))), 40, "same"))
        for axes in ((2, 2), (32, 8))
    )
    assert large <= 4 * small  # of 64 times the ranks


# What it is


def test_a_plan_is_remembered_with_its_source() -> None:
    src, dst = layout(grid(4), S(0), (8, 8)), layout(grid(4), B, (8, 8))
    assert between(src, dst) is between(src, dst)
    assert between(src, dst) is not between(dst, src)
    assert flow.boxing.between(src, dst) is between(src, dst)


def test_plans_do_not_keep_their_layouts_alive() -> None:
    """Shapes that come once, as in batches of any length, must not pile up."""
    src, dst = layout(grid(4), S(0), (987, 3)), layout(grid(4), B, (987, 3))
    assert box(box(drawn(src)[0], src, dst), dst, src)
    gone: list[Callable[[], object]] = [weakref.ref(src), weakref.ref(dst), weakref.ref(between(src, dst))]
    del src, dst
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_another_cluster_makes_another_plan() -> None:
    src, dst = layout(grid(4), P, (8, 8)), layout(grid(4), B, (8, 8))
    with use_cluster("flat"):
        by_bytes = between(src, dst)
        assert between(src, dst) is by_bytes
    with use_cluster("cpu"):
        by_latency = between(src, dst)
    assert [by_bytes.route, by_latency.route] == ["all_reduce", "all_reduce_once"]
    assert [by_bytes.cluster, by_latency.cluster] == [cluster("flat"), cluster("cpu")]
    with use_cluster("flat"):
        assert between(src, dst).route == "all_reduce"


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        (S(0), B, "(S(0),) -> (B,): all_gather over 0 -> (B,), 384 bytes a rank"),
        (P, S(1), "(P,) -> (S(1),): reduce_scatter over 0 -> (S(1),), 384 bytes a rank"),
        (P, B, "(P,) -> (B,): all_reduce over 0 -> (B,), 768 bytes a rank"),
        (S(0), S(1), "(S(0),) -> (S(1),): all_to_all over 0 -> (S(1),), 96 bytes a rank"),
        (B, S(0), "(B,) -> (S(0),): slice -> (S(0),), 0 bytes a rank"),
        (B, P, "(B,) -> (P,): to_partial -> (P,), 0 bytes a rank"),
        (S(1), S(1), "(S(1),) -> (S(1),): nothing to do, 0 bytes a rank"),
    ],
    ids=str,
)
def test_a_plan_reads_as_a_sentence(src: Sbp, dst: Sbp, text: str) -> None:
    a, b = layout(grid(4), src, (8, 8), torch.float64), layout(grid(4), dst, (8, 8), torch.float64)
    with use_cluster("flat"):
        assert str(between(a, b)) == text


def test_a_plan_tells_axes_by_name_and_the_other_placement() -> None:
    p = placement("cpu:[0-3] as (data=2, tensor=2)")
    with use_cluster("flat"):
        inside = between(layout(p, (S(0), P), (8, 8)), layout(p, (S(0), S(1)), (8, 8)))
        outside = between(layout(p, (S(0), S(1)), (8, 8)), layout(placement("cpu:[7]"), B, (8, 8)))
    assert str(inside) == "(S(0), P) -> (S(0), S(1)): reduce_scatter over tensor -> (S(0), S(1)), 64 bytes a rank"
    assert str(outside) == ("(S(0), S(1)) -> (B,) on cpu:[7]: transfer -> (B,), 256 bytes a rank")


def test_a_boxing_is_between_layouts_of_one_tensor() -> None:
    here = layout(grid(4), S(0), (8, 8))
    for other in (layout(grid(4), B, (8, 9)), layout(grid(4), B, (8, 8), torch.float64)):
        with pytest.raises(SbpError, match="not its shape or dtype"):
            between(here, other)


def test_slices_in_a_row_are_one() -> None:
    p = grid(2, 2, 2)
    way = between(layout(p, B, (8, 8)), layout(p, (S(0), S(1), S(0)), (8, 8)))
    assert [move.kind for move in way.moves] == ["slice"]


# Between placements: grids, and their ranks

WHERE: dict[str, tuple[Placement, Placement]] = {
    "equal": (grid(4), placement("cpu:[0-3] as (x=4)")),
    "disjoint": (grid(4), placement("cpu:[4-7]")),
    "overlapping": (grid(4), placement("cpu:[2-5]")),
    "larger": (grid(2), grid(6)),
    "larger by half": (grid(4), grid(6)),
    "one to many": (placement("cpu:[3]"), grid(4)),
    "other order": (grid(4), placement("cpu:[3, 1, 0, 2]")),
    "(2, 2) and (4)": (grid(2, 2), grid(4)),
    "(2, 4) and (4, 2)": (grid(2, 4), grid(4, 2)),
    "(8) and (2, 4)": (grid(8), grid(2, 4)),
    "(8) and (2, 2, 2)": (grid(8), grid(2, 2, 2)),
    "(2, 3) and (3, 2)": (grid(2, 3), grid(3, 2)),
    "(2, 2) and (2, 2) across": (grid(2, 2), placement("cpu", [[0, 2], [1, 3]])),
    "(2, 2) and (2, 4)": (grid(2, 2), grid(2, 4)),
    "(2, 2) and (3) apart": (grid(2, 2), placement("cpu:[5-7]")),
}
BETWEEN = pytest.mark.parametrize("where", WHERE)


def public_pairs(where: str, shape: tuple[int, ...], kinds: Sequence[Sbp] = (S(0), S(1), B, P)) -> list[Pair]:
    """Every pair of signatures, there and back."""
    p, q = (public(side, shape, kinds) for side in WHERE[where])
    return [*every_pair(p, q), *every_pair(q, p)]


@pytest.mark.sampled(8)
@BETWEEN
@OF_ALL_SIZES
@pytest.mark.parametrize("prices", ["cpu", "flat"])
def test_a_move_between_placements_keeps_the_value(where: str, size: str, prices: str) -> None:
    with use_cluster(prices):
        assert broken(sample(public_pairs(where, SHAPES[size]), 32, (where, size)), sends_what_it_planned) == []


@pytest.mark.sweep
@BETWEEN
@OF_ALL_SIZES
@ON_NETWORKS
def test_every_move_between_placements_keeps_the_value(where: str, size: str, prices: str) -> None:
    """Of those between grids so many."""
    with use_cluster(prices):
        assert broken(sample(public_pairs(where, SHAPES[size]), 150, (where, size)), sends_what_it_planned) == []


@pytest.mark.sampled(8)
@BETWEEN
@pytest.mark.parametrize("kind", [P("max"), P("min")], ids=str)
def test_maxima_cross_placements_too(where: str, kind: Sbp) -> None:
    pairs = sample(public_pairs(where, (7, 5), (S(0), B, kind)), 40, where)
    assert broken(pairs, sends_what_it_planned) == []


@pytest.mark.sampled(6)
@BETWEEN
def test_nested_splits_cross_placements_in_any_order(where: str) -> None:
    p, q = ([*ordered(side, (11, 9)), *holed(side, (11, 9))] for side in WHERE[where])
    assert broken(sample([*every_pair(p, q), *every_pair(q, p)], 40, where), sends_what_it_planned) == []


@BETWEEN
def test_what_cannot_be_cut_crosses_placements(where: str) -> None:
    p, q = (public(side, (), (B, P)) for side in WHERE[where])
    assert broken([*every_pair(p, q), *every_pair(q, p)], sends_what_it_planned) == []


@pytest.mark.parametrize(
    ("one", "other"), [((2, 2), (4,)), ((2, 4), (4, 2)), ((8,), (2, 2, 2)), ((8,), (4, 2))], ids=str
)
def test_the_same_pieces_on_another_grid_stay_where_they_are(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    shape = (48, 96)
    same = [
        (a, b)
        for a, b in every_pair(public(grid(*one), shape), public(grid(*other), shape))
        if not a.state.partial and not b.state.partial and pieces(a) == pieces(b)
    ]
    assert len(same) >= 3
    assert [str(between(a, b)) for a, b in same if between(a, b).bytes or between(b, a).bytes] == []


def pieces(lies: Layout) -> list[list[list[int]]]:
    return [[index.tolist() for index in held(lies, r)] for r in lies.placement.flat]


def test_addends_of_every_axis_stay_addends_on_another_grid() -> None:
    square, line = layout(grid(2, 2), (P, P), (8, 8)), layout(grid(4), P, (8, 8))
    assert [between(square, line).bytes, between(line, square).bytes] == [0, 0]


HOSTS = {
    "next hosts": (placement("cpu", range(8)).reshape((2, 4)), placement("cpu", range(8, 16)).reshape((2, 4))),
    "one host to two": (placement("cpu:[0-3]"), placement("cpu", range(4, 12)).reshape((2, 4))),
    "two hosts to one": (placement("cpu", range(8)).reshape((2, 4)), placement("cpu:[8-11]")),
    "flat to flat": (placement("cpu:[0-7]"), placement("cpu:[8-15]")),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("shape", [(48, 96), (33, 35)], ids=str)
def test_every_byte_enters_a_host_once(hosts: str, shape: tuple[int, int]) -> None:
    p, q = HOSTS[hosts]
    with use_cluster(cluster("two_level").with_node(4)):
        ways = [between(src, layout(q, B, shape, torch.float64)) for src in public(p, shape)]
    assert [str(way) for way in ways if max(entering(way, q).values()) > way.src.nbytes] == []


def entering(way: Boxing, q: Placement) -> Counter[int]:
    """Bytes that arrive at each host (of four ranks) of `q` from other hosts."""
    found: Counter[int] = Counter()
    for rank in q.flat:
        for one in itertools.chain.from_iterable(way.programs(rank)):
            found[rank // 4] += sum(part.numel for part in one.receives if part.peer // 4 != rank // 4)
    return Counter({host: numel * way.src.dtype.itemsize for host, numel in found.items()})


@pytest.mark.parametrize("hosts", HOSTS)
def test_addends_are_summed_before_they_leave(hosts: str) -> None:
    """No host sends out more than the whole tensor for each host that is to have it."""
    p, q = HOSTS[hosts]
    with use_cluster(cluster("two_level").with_node(4)):
        way = between(layout(p, [P] * p.ndim, (48, 96)), layout(q, [B] * q.ndim, (48, 96)))
    leaving = sum(
        part.numel for r in p.flat for own in way.programs(r) for one in own for part in one.sends if part.peer in q
    )
    assert leaving * 4 <= way.src.nbytes * -(-q.size // 4)


def test_replicas_share_the_sending() -> None:
    p, q = grid(4), placement("cpu:[4-7]")
    with use_cluster("flat"):
        way = between(layout(p, B, (48, 96)), layout(q, B, (48, 96)))
    crossing = [sum(part.numel for one in way.programs(r)[0] for part in one.sends) for r in p.flat]
    assert max(crossing) * 4 == sum(crossing)


def test_a_token_stands_for_a_placement_elsewhere() -> None:
    """One process owns all here, so there is a shard for every rank, whichever placement it is on."""
    src, dst = layout(grid(2), S(0), (5,)), layout(placement("cpu:[7]"), B, (5,))
    out = box([torch.arange(3.0), torch.arange(3.0, 5.0)], src, dst)
    assert [t.tolist() for t in out] == [[0, 1, 2, 3, 4]]
