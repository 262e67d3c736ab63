"""The gradient of a move is its transpose: for every layout and every way for gradients to lie, twice over.

The oracle differentiates one plain tensor: the logical value, built from the leaf shards by torch's own autograd.
"""

import itertools
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from sbpflow.boxing import Moves, box, record
from sbpflow.placement import Placement, placement, use_cluster
from sbpflow.sbp import B, Layout, P, S, Sbp, SbpLike, layout
from tests.boxing.oracle import (
    GRIDS,
    SHAPES,
    Pair,
    assert_gradients,
    assert_means,
    broken,
    drawn,
    every_pair,
    grid,
    sample,
    with_gradients,
)

ON_ALL_GRIDS = pytest.mark.parametrize("axes", GRIDS, ids=str)
OF_ALL_SIZES = pytest.mark.parametrize("size", SHAPES)
MAX, MIN = P("max"), P("min")
LINE = placement("cpu:[0-3]")
SQUARE = placement("cpu:[0-3] as (2, 2)")


def passes_its_gradient_back(src: Layout, dst: Layout) -> None:
    shards, whole = drawn(src, (src.lie, dst.lie))
    cotangents, factors = drawn(dst.dual, (dst.lie, src.lie))
    leaves = [shard.requires_grad_() for shard in shards]
    out = box(leaves, src, dst)
    assert_means([shard.detach() for shard in out], dst, whole)
    # Multiples of 840 have whole shares for up to eight ranks that tie for a maximum.
    grads = torch.autograd.grad(out, leaves, [840 * factor for factor in cotangents])
    assert_gradients(grads, shards, src, 840 * factors)


def passes_its_second_gradient_back(src: Layout, dst: Layout) -> None:
    shards, _ = drawn(src)
    leaves = [shard.requires_grad_() for shard in shards]
    cotangents = [factor.requires_grad_() for factor in drawn(dst.dual)[0]]
    first = torch.autograd.grad(box(leaves, src, dst), leaves, cotangents, create_graph=True)
    again, factors = drawn(src.dual.dual, "again")
    assert_gradients(torch.autograd.grad(first, cotangents, again), cotangents, dst.dual, factors)


def pairs_of(layouts: list[Layout], count: int, seed: object) -> list[Pair]:
    return sample(every_pair(layouts), count, seed)


@pytest.mark.sampled(7)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@pytest.mark.parametrize("prices", ["cpu", "flat"])
def test_a_move_passes_its_gradient_back(axes: tuple[int, ...], size: str, prices: str) -> None:
    layouts = with_gradients(grid(*axes), SHAPES[size])
    with use_cluster(prices):
        assert broken(pairs_of(layouts, 30, (axes, size, prices)), passes_its_gradient_back) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_many_moves_pass_their_gradients_back(axes: tuple[int, ...], size: str) -> None:
    """All pairs there are on one axis and two; on three, a tenth of them."""
    layouts = with_gradients(grid(*axes), SHAPES[size])
    with use_cluster("flat"):
        assert broken(pairs_of(layouts, 1500, (axes, size)), passes_its_gradient_back) == []


@pytest.mark.sampled(4)
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_the_gradient_of_a_gradient_is_the_move_again(axes: tuple[int, ...], size: str) -> None:
    layouts = with_gradients(grid(*axes), SHAPES[size])
    assert broken(pairs_of(layouts, 25, (axes, size)), passes_its_second_gradient_back) == []


@pytest.mark.sweep
@ON_ALL_GRIDS
@OF_ALL_SIZES
def test_many_gradients_of_gradients_are_the_move_again(axes: tuple[int, ...], size: str) -> None:
    layouts = with_gradients(grid(*axes), SHAPES[size])
    assert broken(pairs_of(layouts, 1000, (axes, size)), passes_its_second_gradient_back) == []


@pytest.mark.sampled(2)
@ON_ALL_GRIDS
@OF_ALL_SIZES
@pytest.mark.parametrize("kind", [MAX, MIN], ids=str)
def test_a_maximum_passes_its_gradient_to_its_holders(axes: tuple[int, ...], size: str, kind: Sbp) -> None:
    sources = with_gradients(grid(*axes), SHAPES[size], (S(0), B, kind))
    targets = with_gradients(grid(*axes), SHAPES[size], (S(1), B, kind))
    moved = [(src, dst) for src, dst in every_pair(sources, targets) if src.state != dst.state]
    assert broken(sample(moved, 30, (axes, size)), passes_its_gradient_back) == []


def test_a_maximum_that_stays_passes_the_gradient_as_it_is() -> None:
    lies = layout(SQUARE, (MAX, S(0)), (4, 2), torch.float64)
    leaves = [shard.requires_grad_() for shard in drawn(lies)[0]]
    factors = drawn(lies.dual)[0]
    assert all(map(torch.equal, torch.autograd.grad(box(leaves, lies, lies), leaves, factors), factors))


@pytest.mark.parametrize("target", [S(0), B, P], ids=str)
@pytest.mark.parametrize("values", [(1, 2, 2, 0), (3, 3, 3, 3), (0, 0, 7, 0)], ids=str)
def test_ties_share_the_gradient(values: tuple[int, ...], target: Sbp) -> None:
    src, dst = layout(LINE, MAX, (4,), torch.float64), layout(LINE, target, (4,), torch.float64)
    leaves = [torch.full((4,), float(v), dtype=torch.float64, requires_grad=True) for v in values]
    cotangents, factors = drawn(dst.dual)
    grads = torch.autograd.grad(box(leaves, src, dst), leaves, cotangents)
    share = 1 / values.count(max(values))
    assert all(torch.equal(g, factors * share * (v == max(values))) for g, v in zip(grads, values, strict=True))


@pytest.mark.parametrize("target", [S(0), B], ids=str)
def test_the_second_gradient_of_a_maximum_flows_along_the_same_choice(target: Sbp) -> None:
    passes_its_second_gradient_back(layout(LINE, MAX, (8,), torch.float64), layout(LINE, target, (8,), torch.float64))


# The design's table of moves on 4 ranks, a tensor of 8 x 8 float64 (512 bytes, so 128 a piece): what is moved forward
# and backward, with the bytes that each rank receives.
Row: TypeAlias = tuple[Sbp, Sbp | None, Sbp, Sbp | None, list[tuple[str, int]], list[tuple[str, int]]]
TABLE: dict[str, Row] = {
    "S -> B (grad P)": (S(0), None, B, P, [("all_gather", 384)], [("reduce_scatter", 384)]),
    "S -> B (grad B)": (S(0), None, B, B, [("all_gather", 384)], [("slice", 0)]),
    "P -> B (grad B)": (P, None, B, B, [("all_reduce", 768)], [("view", 0)]),
    "P -> B (grad P)": (P, None, B, P, [("all_reduce", 768)], [("all_reduce", 768)]),
    "P -> S": (P, None, S(0), None, [("reduce_scatter", 384)], [("all_gather", 384)]),
    "S(i) -> S(j)": (S(0), None, S(1), None, [("all_to_all", 96)], [("all_to_all", 96)]),
    "B (grad B) -> S": (B, B, S(0), None, [("slice", 0)], [("all_gather", 384)]),
    "B (grad P) -> S": (B, P, S(0), None, [("slice", 0)], [("to_partial", 0)]),
    "B (grad B) -> B (grad P)": (B, B, B, P, [("view", 0)], [("all_reduce", 768)]),
    "B (grad P) -> B (grad B)": (B, P, B, B, [("view", 0)], [("to_partial", 0)]),
}


@pytest.mark.parametrize("row", TABLE)
def test_the_table_of_moves(row: str) -> None:
    entry, grad, target, target_grad, forward, backward = TABLE[row]
    src = layout(LINE, entry, (8, 8), torch.float64, grad)
    dst = layout(LINE, target, (8, 8), torch.float64, target_grad)
    with use_cluster("flat"):
        there, back = moves_there_and_back(src, dst)
        passes_its_gradient_back(src, dst)
    assert [(move.route, move.bytes) for move in there] == forward
    assert [(move.route, move.bytes) for move in back] == backward


def moves_there_and_back(src: Layout, dst: Layout) -> tuple[Moves, Moves]:
    leaves = [shard.requires_grad_() for shard in drawn(src)[0]]
    with record() as there:
        out = box(leaves, src, dst)
    with record() as back:
        torch.autograd.grad(out, leaves, drawn(dst.dual)[0])
    return there, back


def test_the_table_between_placements() -> None:
    src, dst = layout(LINE, S(0), (8, 8)), layout(placement("cpu:[4-5]"), S(0), (8, 8))
    there, back = moves_there_and_back(src, dst)
    assert [(move.route, move.bytes) for move in there] == [("transfer", 128)]
    assert [(move.route, move.bytes) for move in back] == [("transfer", 64)]
    passes_its_gradient_back(src.dual.dual, dst)


@pytest.mark.parametrize("row", TABLE)
def test_moves_with_nothing_to_send_copy_nothing_backward_either(row: str) -> None:
    entry, grad, target, target_grad, _, backward = TABLE[row]
    src = layout(LINE, entry, (8, 8), torch.float64, grad)
    dst = layout(LINE, target, (8, 8), torch.float64, target_grad)
    cotangents, _ = drawn(dst.dual)
    leaves = [shard.requires_grad_() for shard in drawn(src)[0]]
    grads = torch.autograd.grad(box(leaves, src, dst), leaves, cotangents)
    shared = [g.untyped_storage().data_ptr() == c.untyped_storage().data_ptr() for g, c in zip(grads, cotangents)]  # noqa: B905
    assert all(shared) is (backward[0][0] in ("view", "slice"))


PLACES = {
    "equal": ((2, 2), [0, 1, 2, 3]),
    "disjoint": ((2, 2), [4, 5, 6, 7]),
    "overlapping": ((2, 2), [2, 3, 4, 5]),
    "larger": ((2, 4), [0, 1, 2, 3, 4, 5, 6, 7]),
    "smaller": ((2,), [1, 3]),
    "regrouped": ((4,), [0, 1, 2, 3]),
    "reordered": ((2, 2), [0, 2, 1, 3]),
}


def other(name: str) -> Placement:
    axes, ranks = PLACES[name]
    return placement("cpu", ranks).reshape(axes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", PLACES)
@OF_ALL_SIZES
def test_gradients_return_from_other_placements(where: str, size: str) -> None:
    sources, targets = with_gradients(SQUARE, SHAPES[size]), with_gradients(other(where), SHAPES[size])
    pairs = [*every_pair(sources, targets), *every_pair(targets, sources)]
    chosen = sample(pairs, 30, (where, size))
    assert broken(chosen, passes_its_gradient_back) == []
    assert broken(chosen[:10], passes_its_second_gradient_back) == []


@pytest.mark.sweep
@pytest.mark.parametrize("where", PLACES)
@OF_ALL_SIZES
def test_all_gradients_return_from_other_placements(where: str, size: str) -> None:
    sources, targets = with_gradients(SQUARE, SHAPES[size]), with_gradients(other(where), SHAPES[size])
    pairs = [*every_pair(sources, targets), *every_pair(targets, sources)]
    assert broken(sample(pairs, 500, where), passes_its_gradient_back) == []


@pytest.mark.parametrize(("sbp", "target"), [(S(0), B), (P, S(1)), (B, S(0)), (S(0), S(1))], ids=str)
def test_backward_of_a_loss_fills_the_leaves(sbp: SbpLike, target: SbpLike) -> None:
    src, dst = layout(LINE, sbp, (8, 8), torch.float64), layout(LINE, target, (8, 8), torch.float64)
    leaves = [shard.requires_grad_() for shard in drawn(src)[0]]
    cotangents, factors = drawn(dst.dual)
    sum((out * c).sum() for out, c in zip(box(leaves, src, dst), cotangents, strict=True)).backward()  # type: ignore[union-attr]
    assert_gradients([leaf.grad for leaf in leaves if leaf.grad is not None], leaves, src, factors)


def test_what_needs_no_gradient_gets_none() -> None:
    src, dst = layout(LINE, S(0), (8,)), layout(LINE, B, (8,))
    assert not any(out.requires_grad for out in box(drawn(src)[0], src, dst))
    with torch.no_grad():
        assert not any(out.requires_grad for out in box([s.requires_grad_() for s in drawn(src)[0]], src, dst))


def test_moves_compose_as_their_gradients_do() -> None:
    layouts = [layout(SQUARE, sbp, (8, 8), torch.float64) for sbp in ((P, S(0)), (S(1), S(0)), (S(0), B), (B, S(1)))]
    shards, whole = drawn(layouts[0])
    here: tuple[Tensor, ...] = tuple(shard.requires_grad_() for shard in shards)
    for src, dst in itertools.pairwise(layouts):
        here = box(here, src, dst)
    cotangents, factors = drawn(layouts[-1].dual)
    assert_means([shard.detach() for shard in here], layouts[-1], whole)
    assert_gradients(torch.autograd.grad(here, shards, cotangents), shards, layouts[0], factors)
