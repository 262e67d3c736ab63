"""Layouts: local shapes and offsets of any size on any grid, one object each, and the dual of the dual."""

import copy
import gc
import pickle
import random
import weakref
from itertools import product
from math import prod

import pytest
import torch

from sbpflow.placement import Placement, placement
from sbpflow.placement.errors import SbpError, SbpflowError, ShapeError
from sbpflow.sbp import B, Layout, P, S, Sbp, SbpLike, State, layout
from tests.ranks import Fresh

GRID = placement("cpu:[0-3] as (data=2, tensor=2)")
LINE = placement("cpu:[0-3]")
MAX, MIN = P("max"), P("min")
KINDS: list[Sbp] = [S(0), S(1), B, P]
GRIDS = [(1,), (4,), (2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2), (2, 1, 3)]
SHAPES = [(8, 16), (11, 9), (1, 3), (2, 0), (0, 0)]


def grid(axes: tuple[int, ...]) -> Placement:
    return placement("cpu", range(prod(axes))).reshape(axes)


def cut(whole: torch.Tensor, sbp: tuple[Sbp, ...], p: Placement, rank: int) -> torch.Tensor:
    """The oracle: axis by axis, the piece that `tensor_split` gives."""
    for entry, i, n in zip(sbp, p.coords(rank), p.shape, strict=True):
        if entry in (S(0), S(1)):
            whole = whole.tensor_split(n, dim=0 if entry is S(0) else 1)[i]
    return whole


@pytest.mark.parametrize("axes", GRIDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_holds_what_tensor_split_gives_it(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    p, whole = grid(axes), torch.arange(prod(shape)).reshape(shape)
    for sbp in product(KINDS, repeat=p.ndim):
        lies = layout(p, sbp, shape, torch.int64)
        for rank in p.flat:
            piece = cut(whole, sbp, p, rank)
            assert lies.local_shape(rank) == piece.shape
            assert torch.equal(whole[lies.slices(rank)], piece)


@pytest.mark.parametrize("axes", GRIDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_offset_is_the_index_of_the_first_element(axes: tuple[int, ...], shape: tuple[int, int]) -> None:
    p = grid(axes)
    where = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1)
    for sbp in product(KINDS[:3], repeat=p.ndim):
        lies = layout(p, sbp, shape)
        for rank in p.flat:
            piece = torch.stack([cut(where[..., d], sbp, p, rank) for d in range(2)], -1)
            if piece.numel():
                assert lies.offset(rank) == tuple(piece[0, 0].tolist())


def test_an_empty_piece_begins_at_nought_in_the_dim_that_it_has_nothing_of() -> None:
    lies = layout(placement("cpu:[0-3] as (2, 2)"), (S(0), S(1)), (1, 5))
    assert [lies.offset(rank) for rank in range(4)] == [(0, 0), (0, 3), (0, 0), (0, 3)]
    assert [lies.slices(rank)[0] for rank in range(4)] == [slice(0, 1)] * 2 + [slice(0, 0)] * 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 5, 7, 8, 11])
@pytest.mark.parametrize("axes", [(2, 2), (2, 4), (3, 2)], ids=str)
def test_nested_splits_follow_the_order_of_axes(axes: tuple[int, int], size: int, order: tuple[int, int]) -> None:
    p, whole = grid(axes), torch.arange(size)
    lies = Layout(p, State((order,)), (size,), torch.int64)
    for rank in p.flat:
        outer, inner = (p.coords(rank)[a] for a in order)
        piece = whole.tensor_split(axes[order[0]])[outer].tensor_split(axes[order[1]])[inner]
        assert torch.equal(whole[lies.slices(rank)], piece)


@pytest.mark.parametrize("size", [0, 1, 5, 8, 13])
def test_a_hole_is_all_pieces_of_a_cut(size: int) -> None:
    lies = Layout(GRID, State(((-2, 1),)), (size,), torch.int64)
    for rank in GRID.flat:
        halves = [half.tensor_split(2)[rank % 2].tolist() for half in torch.arange(size).tensor_split(2)]
        assert [i for lo, hi in lies.spans(rank)[0] for i in range(lo, hi)] == [*halves[0], *halves[1]]


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_fewer_elements_than_ranks_leave_some_empty(size: int) -> None:
    lies = layout(LINE, S(0), (size, 5))
    assert [lies.local_shape(r) for r in range(4)] == [(1, 5)] * size + [(0, 5)] * (4 - size)


def test_ranks_in_any_order_hold_by_their_place() -> None:
    lies = layout(placement("cpu", [[7, 2], [5, 0]]), (S(0), S(1)), (3, 3))
    assert [lies.local_shape(r) for r in (7, 2, 5, 0)] == [(2, 2), (2, 1), (1, 2), (1, 1)]
    assert [lies.offset(r) for r in (7, 2, 5, 0)] == [(0, 0), (0, 2), (2, 0), (2, 2)]


@pytest.mark.parametrize("sbp", list(product([S(0), S(-1), B, P], repeat=2)), ids=str)
def test_equal_layouts_are_one_object(sbp: tuple[Sbp, ...]) -> None:
    lies = layout(GRID, sbp, (4, 6), torch.float64)
    assert layout(GRID, list(sbp), torch.Size((4, 6)), torch.float64) is lies
    assert layout(GRID, repr(sbp), [4, 6], torch.float64) is lies  # type: ignore[arg-type]
    assert layout(GRID, dict(zip(("data", "tensor"), sbp, strict=True)), (4, 6), torch.float64) is lies
    assert pickle.loads(pickle.dumps(lies)) is copy.deepcopy(lies) is copy.copy(lies) is lies


def test_other_layouts_are_other_objects() -> None:
    lies = layout(GRID, (S(0), B), (4, 6))
    assert lies != layout(GRID, (S(1), B), (4, 6))
    assert lies != layout(GRID, (S(0), B), (6, 4))
    assert lies != layout(GRID, (S(0), B), (4, 6), torch.float64)
    assert lies != layout(GRID, (S(0), B), (4, 6), grad_sbp=(S(0), P))
    assert lies != layout(GRID.with_names(None), (S(0), B), (4, 6))


def a_layout() -> Layout:
    return layout(placement("cpu:[0-3] as (data=2, tensor=2)"), (S(1), B), (4, 6), grad_sbp=(S(1), P))


def test_a_pickle_from_another_process_is_our_object(fresh: Fresh) -> None:
    (there,) = fresh(1, a_layout)
    assert there.answer is not None
    assert there.answer.value is a_layout()


def test_a_layout_nobody_holds_is_forgotten() -> None:
    gone = weakref.ref(layout(GRID, (S(0), B), (12345, 6)))
    gc.collect()
    assert gone() is None


def test_negative_dims_count_from_the_back() -> None:
    assert layout(GRID, (S(-1), S(-2)), (4, 6)).sbp == (S(1), S(0))
    assert layout(GRID, (S(-3), B), (4, 6, 2)) is layout(GRID, (S(0), B), (4, 6, 2))


@pytest.mark.parametrize("dim", [2, 7, -3])
def test_a_dim_out_of_range_is_refused_with_the_range(dim: int) -> None:
    with pytest.raises(ShapeError, match=r"out of range for a tensor of shape \(4, 6\)\n  dims are -2 to 1") as error:
        layout(GRID, (S(dim), B), (4, 6))
    assert f"S({dim})" in str(error.value)


def test_a_tensor_without_dims_cannot_be_split() -> None:
    with pytest.raises(ShapeError, match="a tensor without dims can be B or P"):
        layout(LINE, S(0), ())


@pytest.mark.parametrize("sbp", [(P, MAX), (MAX, MIN), (MIN, P)], ids=str)
def test_two_kinds_of_addends_are_refused_with_a_fix_that_works(sbp: tuple[Sbp, ...]) -> None:
    with pytest.raises(SbpError, match="a sum of maxima is not the maximum of sums") as error:
        layout(GRID, sbp, (4,))
    layout(GRID, str(error.value).rpartition("sbp=")[2], (4,))


def test_complex_numbers_have_a_sum_and_no_maximum() -> None:
    assert layout(GRID, (P, B), (4,), torch.complex64).sbp == (P, B)
    with pytest.raises(SbpflowError, match="no order"):
        layout(GRID, (MAX, B), (4,), torch.complex64)


@pytest.mark.parametrize(
    ("sbp", "grad_sbp"),
    [((S(0), B), (S(0), P)), ((P, B), (B, B)), ((B, B), (P, P)), ((B, B), {"data": P}), ((B, MAX), (P, P))],
    ids=str,
)
def test_a_gradient_lies_as_it_is_told(sbp: SbpLike, grad_sbp: SbpLike) -> None:
    asked = layout(GRID, grad_sbp, (4, 6))
    assert layout(GRID, sbp, (4, 6), grad_sbp=grad_sbp).dual.sbp == asked.sbp


@pytest.mark.parametrize(
    ("sbp", "grad_sbp", "axis"),
    [
        ((S(0), B), (S(1), B), "data"),
        ((S(0), B), (B, B), "data"),
        ((S(0), B), (P, B), "data"),
        ((S(0), P), (S(0), P), "tensor"),
        ((S(0), P), (S(0), S(0)), "tensor"),
        ((B, B), (B, S(1)), "tensor"),
        ((B, B), (MAX, B), "data"),
        ((MAX, B), (B, B), "data"),
    ],
    ids=str,
)
def test_a_gradient_that_cannot_be_is_refused_by_axis(sbp: SbpLike, grad_sbp: SbpLike, axis: str) -> None:
    with pytest.raises(SbpError, match="does not fit sbp=") as error:
        layout(GRID, sbp, (4, 6), grad_sbp=grad_sbp)
    assert f"on axis {axis}" in str(error.value) or f"on axis {GRID.axis(axis)}" in str(error.value)


def test_on_an_axis_of_one_rank_any_gradient_will_do() -> None:
    p = grid((1, 2))
    assert layout(p, (B, S(0)), (4,), grad_sbp=(P, S(0))).dual.state == State(((1,),))


DUAL: dict[Sbp, Sbp] = {S(0): S(0), S(1): S(1), P: B, B: B, MAX: P, MIN: P}


@pytest.mark.parametrize("kinds", [(S(0), S(1), B, P), (S(0), S(1), B, MAX), (S(0), B, MIN)], ids=str)
def test_the_dual_is_that_of_each_axis(kinds: tuple[Sbp, ...]) -> None:
    for sbp in product(kinds, repeat=2):
        assert layout(GRID, sbp, (4, 6)).dual.sbp == tuple(DUAL[entry] for entry in sbp)


@pytest.mark.parametrize("seed", range(30))
def test_the_dual_of_the_dual_is_the_layout_itself(seed: int) -> None:
    dice = random.Random(seed)
    p = grid(dice.choice(GRIDS))
    sbp = tuple(dice.choices(KINDS, k=p.ndim))
    grad = tuple(dice.choice(KINDS[2:]) if entry is B else DUAL[entry] for entry in sbp)
    lies = layout(p, sbp, (4, 6), grad_sbp=grad)
    assert lies.dual.dual.state == lies.state
    assert lies.dual.dual.grad_partial == lies.grad_partial
    assert lies.dual.dual is lies or 1 in p.shape  # an axis of one rank forgets what it was called


def test_a_layout_prints_what_it_is() -> None:
    assert repr(layout(GRID, (S(0), P), (4, 6))) == "float32 (4, 6) as (S(0), P) on cpu:[0-3] as (data=2, tensor=2)"
    assert Layout(GRID, State(((1, 0), ())), (4, 6), torch.int8).lie == "(S(0), S(0)) [dim 0: tensor, data]"
    assert Layout(GRID, State(((), (-2, 1))), (4, 6), torch.int8).lie == "(B, S(1)) [dim 1: all 2, tensor]"
    assert layout(LINE, MAX, (4,)).lie == '(P("max"),)'


@pytest.mark.parametrize(
    ("sbp", "grad_sbp", "text"),
    [
        ((B, S(0)), (P, S(0)), "(B, S(0)) with gradient (P, S(0))"),
        ((P, B), (B, P), "(P, B) with gradient (B, P)"),
        ((P, B), (B, B), "(P, B)"),
        ((B, B), (B, B), "(B, B)"),
    ],
    ids=str,
)
def test_a_layout_tells_its_gradient_where_it_is_not_the_usual_one(sbp: SbpLike, grad_sbp: SbpLike, text: str) -> None:
    lies = layout(GRID, sbp, (4, 6), grad_sbp=grad_sbp)
    assert lies.lie == text
    assert repr(lies) == f"float32 (4, 6) as {text} on {GRID}"
    assert repr(lies.dual)


def test_sizes_are_those_of_the_logical_tensor() -> None:
    lies = layout(GRID, (S(0), S(0)), (5, 3), torch.float64)
    assert (lies.numel, lies.nbytes) == (15, 120)
    assert (layout(GRID, B, ()).numel, layout(GRID, B, (4, 0)).nbytes) == (1, 0)


def test_another_signature_or_placement_is_one_call() -> None:
    lies = layout(GRID, (S(0), B), (4, 6))
    assert lies.to(B) is layout(GRID, B, (4, 6))
    assert lies.to(placement=GRID.with_names(None)) is layout(GRID.with_names(None), (S(0), B), (4, 6))
    assert lies.to(grad_sbp=(S(0), P)) is layout(GRID, (S(0), B), (4, 6), grad_sbp=(S(0), P))
    assert lies.to(S(1), LINE) is layout(LINE, S(1), (4, 6))


def test_a_rank_outside_has_no_piece() -> None:
    with pytest.raises(SbpflowError, match="rank 9 is not in"):
        layout(GRID, B, (4, 6)).local_shape(9)


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (2.5,), ("4",)], ids=str)
def test_a_shape_that_cannot_be_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SbpflowError):
        layout(LINE, B, shape)


@pytest.mark.parametrize("shape", [(10**18, 10**18), (1 << 61,), (1 << 31, 1 << 31, 2)], ids=str)
def test_a_tensor_of_more_bytes_than_can_be_counted_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="more bytes than can be counted"):
        layout(placement("cpu:[0-1]"), S(0), shape)
    assert layout(placement("cpu:[0-1]"), S(0), (1 << 60,)).nbytes == 1 << 62
