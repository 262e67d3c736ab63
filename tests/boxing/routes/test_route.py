"""Routes: never dearer than changing one axis at a time in any order, nor than a detour; free pairs cost nothing."""

import itertools
from collections.abc import Sequence
from functools import partial
from math import prod

import pytest
import torch

from sbpflow.boxing import between, box
from sbpflow.boxing.exchange.execute import transport
from sbpflow.boxing.routes.route import search
from sbpflow.placement import placement, use_cluster
from sbpflow.placement.links import Links
from sbpflow.sbp import B, Layout, P, S, Sbp, State, layout
from tests.boxing.oracle import (
    GRIDS,
    SHAPES,
    Law,
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
ON_GRIDS_OF_AXES = pytest.mark.parametrize("axes", [(2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2)], ids=str)
OF_ALL_SIZES = pytest.mark.parametrize("size", SHAPES)
ON_NETWORKS = pytest.mark.parametrize("prices", ["flat", "two_level", "cpu"])
EVEN = (480, 960)
NOISE = 1 + 1e-9  # of sums of floats


def per_axis(src: Layout, dst: Layout, links: Links, holes: bool) -> float:
    """The time of the best way to change the axes one by one in some order, each by a collective of its own.

    Straight to the target, or with all axes made B on the way. An axis that comes to split a dim cuts what is there
    further; with `holes`, one may go while others still cut what it had cut.
    """
    nested = [*itertools.chain(*dst.state.dims), *dst.state.partial]
    ways: list[list[tuple[int, Sbp]]] = []
    for order in itertools.permutations(range(src.placement.ndim)):
        straight, back = [(a, dst.sbp[a]) for a in order], [(a, dst.sbp[a]) for a in nested]
        ways += [straight, [*((a, B) for a in order), *back]]
    found = []
    for steps in ways:
        stops = list(itertools.accumulate(steps, changed, initial=src))
        odd = any(f < 0 for stop in stops for factors in stop.state.dims for f in factors)
        if stops[-1].state == dst.state and (holes or not odd):
            found.append(sum(step_time(a, b, links) for a, b in itertools.pairwise(stops)))
    return min(found)


def changed(lies: Layout, step: tuple[int, Sbp]) -> Layout:
    """The layout after one axis alone has taken another signature."""
    axis, entry = step
    if lies.sbp[axis] is entry:
        return lies
    dims = [[-lies.placement.shape[axis] if f == axis else f for f in factors] for factors in lies.state.dims]
    for d, factors in enumerate(dims):
        while factors and factors[-1] < 0:
            factors.pop()
        factors += [axis] if entry is S(d) else []
    partial = {*lies.state.partial} - {axis} | ({axis} if entry is P else set())
    return lies.with_state(State(tuple(map(tuple, dims)), tuple(sorted(partial))))


def step_time(before: Layout, after: Layout, links: Links) -> float:
    """The price of the one collective that changes one axis."""
    for axis, (was, now) in enumerate(zip(before.sbp, after.sbp, strict=True)):
        if was is now or was is B or now is P:
            continue
        n = before.placement.shape[axis]
        if was is P and now is B:
            return links.price("all_reduce", (axis,), local_bytes(before)).time
        if was is P or now is B:
            return links.price("reduce_scatter" if was is P else "all_gather", (axis,), local_bytes(after)).time
        return links.seconds("exchange", (axis,), local_bytes(after) * (n - 1) / n)
    return 0.0


def local_bytes(lies: Layout) -> int:
    return max(prod(map(len, held(lies, r))) for r in lies.placement.flat) * lies.dtype.itemsize


def beats_every_order_of_axes(src: Layout, dst: Layout, *, holes: bool = False) -> None:
    way = between(src, dst)
    best = per_axis(src, dst, Links.of(src.placement, way.cluster), holes)
    assert way.price.time <= best * NOISE, f"{way.price.time:g} > {best:g}, {way}"


beats_orders_that_leave_holes = partial(beats_every_order_of_axes, holes=True)


@pytest.mark.sampled(4)
@ON_GRIDS_OF_AXES
@ON_NETWORKS
@pytest.mark.parametrize("law", [beats_every_order_of_axes, beats_orders_that_leave_holes], ids=["plain", "holes"])
def test_no_order_of_single_axes_is_faster(axes: tuple[int, ...], prices: str, law: Law) -> None:
    pairs = every_pair(public(grid(*axes), EVEN))
    with use_cluster(network(prices, axes)):
        assert broken(sample(pairs, 200 if len(axes) < 3 else 40, (axes, prices)), law) == []


@pytest.mark.sweep
@ON_GRIDS_OF_AXES
@ON_NETWORKS
@pytest.mark.parametrize("law", [beats_every_order_of_axes, beats_orders_that_leave_holes], ids=["plain", "holes"])
def test_no_order_of_single_axes_is_faster_for_any_pair(axes: tuple[int, ...], prices: str, law: Law) -> None:
    """On three axes for a quarter of them."""
    with use_cluster(network(prices, axes)):
        assert broken(sample(every_pair(ordered(grid(*axes), EVEN)), 2000, (axes, prices)), law) == []


@pytest.mark.parametrize("axes", [(2, 4), (2, 2), (4, 8)], ids=str)
def test_a_hierarchical_all_reduce_comes_out_by_itself(axes: tuple[int, int]) -> None:
    """Reduce inside the node, a share of the bytes between nodes, gather inside the node."""
    with use_cluster(network("two_level", axes)):
        way = between(layout(grid(*axes), (P, P), EVEN), layout(grid(*axes), B, EVEN))
    over = [(move.kind, move.axes) for move in way.moves]
    assert over[0] == ("reduce_scatter", (1,))
    assert over[-1] == ("all_gather", (1,))
    crossing = max(move.price.bytes for move in way.moves if 0 in move.axes)
    assert crossing <= 2 * way.src.nbytes / axes[1] * (axes[0] - 1) / axes[0]


@pytest.mark.parametrize(("sbp", "times"), [((P, B), 2.5), ((S(0), S(0)), 2.0)], ids=str)
def test_slow_links_carry_little(sbp: tuple[Sbp, Sbp], times: float) -> None:
    """On 2 nodes of 4: what one axis after the other would cost, over what it costs here, as the prototype measured."""
    p = grid(2, 4)
    src, dst = layout(p, sbp, EVEN), layout(p, B, EVEN)
    with use_cluster(network("two_level", (2, 4))):
        way = between(src, dst)
        links = Links.of(p, way.cluster)
    naive = [changed(src, (1, B)), changed(changed(src, (1, B)), (0, B))]
    assert sum(step_time(a, b, links) for a, b in itertools.pairwise([src, *naive])) >= times * way.price.time


@pytest.mark.sampled(6)
@ON_ALL_GRIDS
@ON_NETWORKS
def test_without_addends_no_detour_is_faster(axes: tuple[int, ...], prices: str) -> None:
    """Between signatures, by way of any nest of splits."""
    stops = [lies for lies in ordered(grid(*axes), EVEN) if not lies.state.partial]
    ends = [lies for lies in public(grid(*axes), EVEN) if not lies.state.partial]
    wrong = []
    with use_cluster(network(prices, axes)):
        ways = itertools.product(ends, stops, ends)
        for a, b, c in sample(ways, 300 if len(axes) < 3 else 20, (axes, prices)):
            if between(a, c).price.time > (between(a, b).price.time + between(b, c).price.time) * NOISE:
                wrong.append(f"{between(a, c)}, but {between(a, b)} and {between(b, c)}")
    assert wrong == []


@ON_ALL_GRIDS
def test_a_larger_tensor_or_a_slower_link_never_makes_a_move_cheaper(axes: tuple[int, ...]) -> None:
    p = grid(*axes)
    for src, dst in sample(every_pair(ordered(p, EVEN)), 40, axes):
        for links in (free(axes, 1.0, 0.0), free(axes, 1.0, 100.0)):
            time = steps_time(src.state, dst.state, EVEN, links)
            assert steps_time(src.state, dst.state, (960, 960), links) >= time / NOISE
            assert steps_time(src.state, dst.state, EVEN, free(axes, 0.5, links.ring((0,))[0])) >= time / NOISE


def free(axes: tuple[int, ...], bandwidth: float, latency: float) -> Links:
    return Links(axes, lambda over, ways: (latency, bandwidth))


def steps_time(src: State, dst: State, shape: tuple[int, ...], links: Links) -> float:
    return sum(step.price.time for step in search(src, dst, shape, 8, links))


@ON_ALL_GRIDS
def test_steps_lead_from_the_source_to_the_target(axes: tuple[int, ...]) -> None:
    p = grid(*axes)
    layouts = [*ordered(p, EVEN), *holed(p, EVEN)]
    for src, dst in sample(every_pair(layouts), 60, axes):
        steps = search(src.state, dst.state, EVEN, 4, free(axes, 1.0, 0.0))
        stops = [src.state, *(step.after for step in steps)]
        assert [step.before for step in steps] == stops[:-1]
        assert stops[-1] == dst.state
        assert min((step.price.bytes for step in steps), default=0) >= 0


@ON_ALL_GRIDS
@ON_NETWORKS
def test_staying_is_no_step(axes: tuple[int, ...], prices: str) -> None:
    with use_cluster(network(prices, axes)):
        assert [str(between(lies, lies)) for lies in ordered(grid(*axes), EVEN) if between(lies, lies).moves] == []


def needs_nothing(src: Layout, dst: Layout) -> bool:
    """Whether every rank holds already, as it is to be, all that it needs."""
    if src.state.partial != dst.state.partial:
        return False
    ranks = src.placement.flat
    return all({*n.tolist()} <= {*h.tolist()} for r in ranks for h, n in zip(held(src, r), held(dst, r), strict=True))


@pytest.mark.sampled(7)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@ON_NETWORKS
def test_where_nothing_needs_to_move_the_result_is_a_view(axes: tuple[int, ...], size: str, prices: str) -> None:
    p, shape = grid(*axes), SHAPES[size]
    free = [(a.sbp, b.sbp) for a, b in every_pair(public(p, EVEN)) if needs_nothing(a, b)]
    pairs = [(layout(p, a, shape), layout(p, b, shape)) for a, b in sample(free, 100, (axes, size))]
    with use_cluster(network(prices, axes)):
        assert broken(pairs, gives_a_view) == []


def gives_a_view(src: Layout, dst: Layout) -> None:
    shards, _ = drawn(src)
    calls = transport().sent.calls.total()
    out = box(shards, src, dst)
    assert transport().sent.calls.total() == calls, f"{between(src, dst)}"
    places = [[t.untyped_storage().data_ptr() for t in tensors] for tensors in (shards, out)]
    assert not src.numel or same_where_full(places, [t.numel() for t in out]), f"{between(src, dst)} copies"


def same_where_full(places: Sequence[Sequence[int]], sizes: Sequence[int]) -> bool:
    return all(a == b for a, b, size in zip(*places, sizes, strict=True) if size)


FREE = [(B, S(0)), (B, S(1)), (B, B), (S(0), S(0)), (P, P), (B, P), (S(0), P), (S(1), P)]


@pytest.mark.parametrize(("sbp", "target"), FREE, ids=str)
@OF_ALL_SIZES
@ON_NETWORKS
def test_free_moves_send_no_byte_in_no_call(sbp: Sbp, target: Sbp, size: str, prices: str) -> None:
    p = placement("cpu:[0-3]")
    src, dst = layout(p, sbp, SHAPES[size]), layout(p, target, SHAPES[size])
    sent = transport().sent
    before = (sent.bytes.total(), sent.calls.total())
    with use_cluster(network(prices, (4,))):
        box(drawn(src)[0], src, dst)
        assert (between(src, dst).total, between(src, dst).price) == (0, (0.0, 0.0))
    assert (sent.bytes.total(), sent.calls.total()) == before


def test_of_addends_made_of_a_whole_the_first_is_the_whole_itself() -> None:
    src, dst = layout(placement("cpu:[0-3]"), B, (8,)), layout(placement("cpu:[0-3]"), P, (8,))
    shards, _ = drawn(src)
    out = box(shards, src, dst)
    assert out[0].data_ptr() == shards[0].data_ptr()
    assert not any(other.any() for other in out[1:])


@pytest.mark.parametrize("kind", [P("max"), P("min")], ids=str)
def test_of_maxima_made_of_a_whole_each_is_the_whole_itself(kind: Sbp) -> None:
    src, dst = layout(placement("cpu:[0-3]"), B, (8,)), layout(placement("cpu:[0-3]"), kind, (8,))
    shards, _ = drawn(src)
    assert [out.data_ptr() for out in box(shards, src, dst)] == [shard.data_ptr() for shard in shards]


WIDE = placement("cpu", range(64)).reshape((2,) * 6)
ENDS: list[tuple[Sbp, ...]] = [
    (S(0),) * 6,
    (S(1),) * 6,
    (B,) * 6,
    (P,) * 6,
    (S(0), S(1), B, P, S(0), B),
    (P, S(0), P, B, S(1), S(1)),
    (P("max"), B, S(0), S(1), B, B),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dst", ENDS, ids=str)
@pytest.mark.parametrize("src", ENDS, ids=str)
def test_a_placement_of_many_axes_is_planned_without_a_search_and_keeps_the_value(
    src: tuple[Sbp, ...], dst: tuple[Sbp, ...]
) -> None:
    a, b = layout(WIDE, src, (9, 7), torch.float64), layout(WIDE, dst, (9, 7), torch.float64)
    assert calls(lambda: between(a, b)) < 1_000_000
    shards, whole = drawn(a, (a.lie, b.lie))
    assert_means(box(shards, a, b), b, whole)


def test_eight_axes_of_two_ranks_are_gathered_at_once() -> None:
    wide = placement("cpu", range(256)).reshape((2,) * 8)
    src = layout(wide, (S(0),) * 8, (1024, 64))
    (move,) = between(src, src.to(B)).moves
    assert (move.kind, move.axes) == ("all_gather", tuple(range(8)))
    assert between(src, src.to(B)).received(0) == 255 * 4 * 64 * 4
