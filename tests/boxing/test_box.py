"""A move keeps the logical value, between any two ways of lying, on any grid, of any size."""

import itertools

import pytest
import torch

from sbpflow.boxing import between, box
from sbpflow.placement import placement, use_cluster
from sbpflow.sbp import B, Layout, P, S, Sbp, layout
from tests.boxing.oracle import (
    GRIDS,
    SHAPES,
    Pair,
    assert_means,
    broken,
    drawn,
    every_pair,
    grid,
    holed,
    network,
    ordered,
    public,
    sample,
)

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
OF_ALL_SIZES = pytest.mark.parametrize("size", SHAPES)
# Latency decides routes on the first, bytes on the second, the slow axis on the third.
UNDER_ALL_PRICES = pytest.mark.parametrize("prices", ["cpu", "flat", "two_level"])

MANY = 1000  # of 4,096 and more on three axes
MAX, MIN = P("max"), P("min")


def keeps_the_value(src: Layout, dst: Layout) -> None:
    shards, whole = drawn(src, (src.lie, dst.lie))
    before = [shard.clone() for shard in shards]
    assert_means(box(shards, src, dst), dst, whole)
    assert all(map(torch.equal, shards, before)), "the source was changed"


def pairs_of(layouts: list[Layout], count: int | None = None, seed: object = 0) -> list[Pair]:
    pairs = list(every_pair(layouts))
    return pairs if count is None else sample(pairs, count, seed)


@pytest.mark.sampled(4)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@UNDER_ALL_PRICES
def test_a_move_between_signatures_keeps_the_value(axes: tuple[int, ...], size: str, prices: str) -> None:
    layouts = public(grid(*axes), SHAPES[size])
    with use_cluster(network(prices, axes)):
        assert broken(pairs_of(layouts, 60, (axes, size, prices)), keeps_the_value) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
@UNDER_ALL_PRICES
def test_every_move_between_signatures_keeps_the_value(axes: tuple[int, ...], size: str, prices: str) -> None:
    """On three axes so many of them."""
    with use_cluster(network(prices, axes)):
        assert broken(pairs_of(public(grid(*axes), SHAPES[size]), MANY, (axes, size, prices)), keeps_the_value) == []


@pytest.mark.sampled(4)
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_nested_splits_in_any_order_keep_the_value(axes: tuple[int, ...], size: str) -> None:
    layouts = ordered(grid(*axes), SHAPES[size])
    with use_cluster("flat"):
        assert broken(pairs_of(layouts, 60, (axes, size)), keeps_the_value) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_every_pair_of_nesting_orders_keeps_the_value(axes: tuple[int, ...], size: str) -> None:
    """On three axes so many of them."""
    with use_cluster("flat"):
        assert broken(pairs_of(ordered(grid(*axes), SHAPES[size]), MANY, (axes, size)), keeps_the_value) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("axes", [(2, 2), (2, 4), (3, 2), (2, 2, 2)], ids=str)
@OF_ALL_SIZES
def test_states_with_holes_keep_the_value(axes: tuple[int, ...], size: str) -> None:
    p = grid(*axes)
    odd, usual = holed(p, SHAPES[size]), ordered(p, SHAPES[size])
    pairs = [*every_pair(odd, usual), *every_pair(usual, odd), *every_pair(odd, odd)]
    with use_cluster("flat"):
        assert broken(sample(pairs, 60, (axes, size)), keeps_the_value) == []


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [(2, 2), (2, 4), (3, 2), (2, 2, 2)], ids=str)
@OF_ALL_SIZES
def test_many_states_with_holes_keep_the_value(axes: tuple[int, ...], size: str) -> None:
    p = grid(*axes)
    odd, usual = holed(p, SHAPES[size]), ordered(p, SHAPES[size])
    pairs = [*every_pair(odd, usual), *every_pair(usual, odd), *every_pair(odd, odd)]
    with use_cluster("flat"):
        assert broken(sample(pairs, 2 * MANY, (axes, size)), keeps_the_value) == []


@pytest.mark.sampled(7)
@ON_ALL_GRIDS
@pytest.mark.parametrize("shape", [(8, 12, 16), (5, 3, 7), (1, 2, 3), (3, 0, 2)], ids=str)
def test_tensors_of_three_dims_keep_the_value(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    layouts = public(grid(*axes), shape, (S(0), S(1), S(2), B, P))
    with use_cluster("flat"):
        assert broken(pairs_of(layouts, 30, (axes, shape)), keeps_the_value) == []


@pytest.mark.sampled(6)
@ON_ALL_GRIDS
@pytest.mark.parametrize("shape", [(), (1,), (7,)], ids=str)
def test_tensors_of_no_dim_and_one_keep_the_value(axes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    layouts = public(grid(*axes), shape, (S(0), B, P) if shape else (B, P))
    assert broken(pairs_of(layouts, 100, (axes, shape)), keeps_the_value) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("axes", [(2, 1), (1, 3), (1,), (2, 1, 2)], ids=str)
@OF_ALL_SIZES
def test_an_axis_of_one_rank_holds_all_whatever_it_is_called(axes: tuple[int, ...], size: str) -> None:
    layouts = public(grid(*axes), SHAPES[size])
    assert broken(pairs_of(layouts, 100, (axes, size)), keeps_the_value) == []


@pytest.mark.sampled(4)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@pytest.mark.parametrize("kind", [MAX, MIN], ids=str)
def test_maxima_and_minima_keep_the_value(axes: tuple[int, ...], size: str, kind: Sbp) -> None:
    layouts = public(grid(*axes), SHAPES[size], (S(0), S(1), B, kind))
    with use_cluster("flat"):
        assert broken(pairs_of(layouts, 60, (axes, size)), keeps_the_value) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
@pytest.mark.parametrize("prices", ["cpu", "flat"])
def test_every_pair_of_maxima_keeps_the_value(axes: tuple[int, ...], size: str, prices: str) -> None:
    with use_cluster(prices):
        layouts = public(grid(*axes), SHAPES[size], (S(0), S(1), B, MAX))
        assert broken(pairs_of(layouts, MANY, (axes, size, prices)), keeps_the_value) == []


@pytest.mark.sampled(7)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@pytest.mark.parametrize(("first", "then"), list(itertools.permutations([P, MAX, MIN], 2)), ids=str)
def test_addends_of_one_kind_become_addends_of_another(axes: tuple[int, ...], size: str, first: Sbp, then: Sbp) -> None:
    p = grid(*axes)
    pairs = list(every_pair(public(p, SHAPES[size], (S(0), B, first)), public(p, SHAPES[size], (S(1), B, then))))
    assert broken(sample(pairs, 25, (axes, size)), keeps_the_value) == []


@pytest.mark.sampled(5)
@ON_ALL_GRIDS
@pytest.mark.parametrize("prices", ["cpu", "flat"])
def test_shards_that_do_not_lie_in_one_piece_are_moved_alike(axes: tuple[int, ...], prices: str) -> None:
    with use_cluster(prices):
        assert broken(pairs_of(public(grid(*axes), (11, 9)), 40, (axes, prices)), moves_columns_first) == []


def moves_columns_first(src: Layout, dst: Layout) -> None:
    shards, whole = drawn(src)
    assert_means(box([shard.t().contiguous().t() for shard in shards], src, dst), dst, whole)


@pytest.mark.sampled(5)
@ON_ALL_GRIDS
@pytest.mark.parametrize("prices", ["cpu", "flat"])
def test_no_rank_writes_into_what_another_holds(axes: tuple[int, ...], prices: str) -> None:
    with use_cluster(prices):
        assert broken(pairs_of(public(grid(*axes), (11, 9)), 40, (axes, prices)), keeps_ranks_apart) == []


def keeps_ranks_apart(src: Layout, dst: Layout) -> None:
    """Ranks of one process share nothing but what a rank has of itself, so that they behave as processes do."""
    shards, _ = drawn(src)
    where = {shard.untyped_storage().data_ptr(): rank for rank, shard in enumerate(shards) if shard.numel()}
    out = {
        rank: shard.untyped_storage().data_ptr() for rank, shard in enumerate(box(shards, src, dst)) if shard.numel()
    }
    assert len({*out.values()}) == len(out), "two ranks hold one buffer"
    assert all(where.get(place, rank) == rank for rank, place in out.items()), "a rank holds another's buffer"


@pytest.mark.parametrize(("src", "dst"), [((1,), (1, 1)), ((1, 1), (1,)), ((1, 1), (1, 1, 1)), ((1,), (1,))], ids=str)
def test_a_rank_alone_may_change_the_shape_of_its_grid(src: tuple[int, ...], dst: tuple[int, ...]) -> None:
    """Nothing is sent, though the two placements are not one."""
    whole = torch.arange(6.0).reshape(2, 3)
    one, other = placement("cpu", [0]).reshape(src), placement("cpu", [0]).reshape(dst)
    kinds: list[Sbp] = [S(0), B, P]
    for a, b in itertools.product(kinds, repeat=2):
        here, there = layout(one, (a,) * len(src), (2, 3)), layout(other, (b,) * len(dst), (2, 3))
        assert between(here, there).total == 0
        (got,) = box([whole], here, there)
        assert torch.equal(got, whole)
