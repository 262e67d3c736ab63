"""Moves to pieces that overlap, and of their gradients back: values, bytes, and what nothing is sent for."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from sbpflow.boxing import between, box, gather, scatter
from sbpflow.placement import Placement, placement
from sbpflow.sbp import B, Layout, S, Sbp, State, layout
from sbpflow.sbp.state import Lie, Window
from tests.ranks import Ranks

F64 = torch.float64
LINE = placement("cpu:[0-3]")
GRID = placement("cpu:[0-3] as (height=2, width=2)")
KERNELS = [Window(0, -1, 1), Window(0, -7, 0), Window(0, 0, 2, 2), Window(0, -2, 4, 3), Window(0, -2, 0, 1, 2)]


def seen_of(where: Placement, sbp: Sequence[Sbp], shape: tuple[int, ...], *windows: Window | None) -> Layout:
    plain = layout(where, sbp, shape, F64)
    return Layout(where, plain.state._replace(windows=windows), shape, F64)


def results(window: Window, length: int) -> Window:
    """The window of as many results as places are there for."""
    return window._replace(size=max(4, (length * window.per - window.last) // window.step))


def whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=F64)


def overlapped(shards: Sequence[torch.Tensor], of: Layout) -> torch.Tensor:
    """The sum of what ranks hold, where it lies; what another axis repeats counts once."""
    total = torch.zeros(of.shape, dtype=F64)
    for rank, shard in zip(of.placement.flat, shards, strict=True):
        total[of.slices(rank)] += shard
    return total


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kernel", "length", "source"), [*product(KERNELS, [3, 4, 9, 16, 23], [S(0), B, S(1)])], ids=str
)
def test_ranks_get_what_their_windows_see_and_gradients_add_up(kernel: Window, length: int, source: Sbp) -> None:
    shape = (length, 5)
    to = seen_of(LINE, (S(0),), shape, results(kernel, length), None)
    have, x = layout(LINE, source, shape, F64), whole_of(shape)
    for rank, shard in zip(LINE.flat, box(scatter(x, have), have, to), strict=True):
        assert torch.equal(shard, x[to.slices(rank)])
    back = [torch.randn(to.local_shape(rank), dtype=F64) for rank in LINE.flat]
    want = overlapped(back, to)
    for target in (S(0), B, S(1)):
        found = box(back, to.dual, layout(LINE, target, shape, F64))
        torch.testing.assert_close(gather(found, layout(LINE, target, shape, F64)), want)


def test_two_dims_send_corners_too() -> None:
    to = seen_of(GRID, (S(0), S(1)), (6, 8), Window(6, -1, 1), Window(8, -2, 2))
    have, x = layout(GRID, (S(0), S(1)), (6, 8), F64), whole_of((6, 8))
    moved = box(scatter(x, have), have, to)
    assert all(torch.equal(shard, x[to.slices(rank)]) for rank, shard in zip(GRID.flat, moved, strict=True))
    assert between(have, to).bytes == (3 * 2 + 1 * 4 + 1 * 2) * 8  # columns, a row, and a corner of the diagonal
    back = [torch.randn(to.local_shape(rank), dtype=F64) for rank in GRID.flat]
    torch.testing.assert_close(gather(box(back, to.dual, have), have), overlapped(back, to))


@pytest.mark.parametrize("reach", [1, 2, 3])
def test_a_halo_is_as_many_rows_a_side_as_windows_reach(reach: int) -> None:
    to = seen_of(LINE, (S(0),), (16, 5), Window(16, -reach, reach), None)
    way = between(layout(LINE, S(0), (16, 5), F64), to)
    assert way.route == "halo"
    assert way.bytes == 2 * reach * 5 * 8
    assert way.total == 6 * reach * 5 * 8  # ranks at the ends have one neighbour
    back = between(to.dual, layout(LINE, S(0), (16, 5), F64))
    assert (back.route, back.total) == ("halo_sum", way.total)


def test_a_rank_of_fewer_rows_than_it_needs_takes_them_of_several() -> None:
    to = seen_of(LINE, (S(0),), (4, 5), Window(4, -2, 2), None)
    way = between(layout(LINE, S(0), (4, 5), F64), to)
    assert [len(program.receives) for rank in LINE.flat for (program,) in way.programs(rank)] == [2, 3, 3, 2]


def test_what_is_whole_is_cut_and_addends_stay_addends() -> None:
    to = seen_of(LINE, (S(0),), (16, 5), Window(16, -1, 1), None)
    assert between(layout(LINE, B, (16, 5), F64), to).route == "slice"
    terms = Layout(LINE, State(((), ()), (0,)), (16, 5), F64)
    back = [torch.randn(to.local_shape(rank), dtype=F64) for rank in LINE.flat]
    assert between(to.dual, terms).route == "to_partial"
    torch.testing.assert_close(gather(box(back, to.dual, terms), terms), overlapped(back, to))


def test_the_gradient_of_a_gradient_lies_as_the_tensor() -> None:
    lie = Lie(State(((0,),), (), "sum", (Window(8, -1, 1),)), ())
    assert lie.dual.state.adds
    assert lie.dual.dual == lie


def test_another_placement_gets_the_pieces_first() -> None:
    other = placement("cpu:[4-5]")
    to = seen_of(other, (S(0),), (9, 5), Window(9, -1, 1), None)
    have, x = layout(LINE, S(0), (9, 5), F64), whole_of((9, 5))
    assert between(have, to).route == "transfer, halo"
    moved = box(scatter(x, have), have, to)
    assert all(torch.equal(shard, x[to.slices(rank)]) for rank, shard in zip(other.flat, moved, strict=True))
    back = [torch.ones(to.local_shape(rank), dtype=F64) for rank in other.flat]
    torch.testing.assert_close(gather(box(back, to.dual, have), have), overlapped(back, to))


def exchanged() -> None:
    from sbpflow.placement.world import owned

    to = seen_of(LINE, (S(0),), (9, 5), Window(9, -2, 1), None)
    have = layout(LINE, S(0), (9, 5), F64)
    x = torch.arange(45, dtype=F64).reshape(9, 5)
    (rank,) = owned(LINE)
    (seen,) = box([x[have.slices(rank)]], have, to)
    assert torch.equal(seen, x[to.slices(rank)])
    back = [x[to.slices(r)] * (r + 1) for r in LINE.flat]
    (found,) = box([back[rank]], to.dual, have)
    assert torch.equal(found, overlapped(back, to)[have.slices(rank)])


def test_real_ranks_exchange_halos(ranks4: Ranks) -> None:
    ranks4(exchanged)
