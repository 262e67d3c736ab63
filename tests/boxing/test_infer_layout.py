"""Pieces that ranks hold already: their layout follows from them, or every rank gets the same error."""

import itertools

import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp import Sbp

GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
SIGNATURES = list(itertools.product([S(0), S(1), B, P], repeat=2))


@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("sbp", SIGNATURES, ids=str)
def test_the_layout_of_scattered_pieces_is_the_one_they_were_scattered_by(
    sbp: tuple[Sbp, Sbp], shape: tuple[int, int]
) -> None:
    lies = flow.layout(GRID, sbp, shape)
    assert flow.boxing.layout_of(flow.boxing.scatter(torch.ones(shape), lies), GRID, sbp) is lies


def test_negative_dims_and_names_are_understood() -> None:
    pieces = [torch.ones(3, 2)] * 4
    assert flow.boxing.layout_of(pieces, GRID, {"tensor": S(-1)}) is flow.layout(GRID, (B, S(1)), (3, 4))


def test_an_unbalanced_piece_is_named_with_the_shape_it_should_have() -> None:
    with pytest.raises(flow.SbpflowError, match=r"rank 0 holds a piece of shape \(1,\)\n.*gives it \(2,\)"):
        flow.boxing.layout_of([torch.ones(1), torch.ones(2)], flow.placement("cpu:[0-1]"), S(0))


def test_pieces_that_differ_on_a_broadcast_axis_are_refused() -> None:
    with pytest.raises(flow.SbpflowError, match="rank 1 holds a piece"):
        flow.boxing.layout_of([torch.ones(2), torch.ones(3)], flow.placement("cpu:[0-1]"), B)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([torch.ones(2), torch.ones(2, dtype=torch.float64)], "rank 0 holds torch.float32, rank 1 torch.float64"),
        ([torch.ones(2), torch.ones(2, 1)], "rank 0 holds 1 dims, rank 1 2"),
        ([torch.ones(2)], "1 shards for ranks"),
    ],
    ids=["dtype", "dims", "count"],
)
def test_pieces_of_different_tensors_are_refused(pieces: list[torch.Tensor], message: str) -> None:
    with pytest.raises(flow.SbpflowError, match=message):
        flow.boxing.layout_of(pieces, flow.placement("cpu:[0-1]"), S(0))


def test_a_given_shape_must_fit_the_pieces() -> None:
    with pytest.raises(flow.SbpflowError, match="gives it"):
        flow.boxing.layout_of([torch.ones(2)] * 2, flow.placement("cpu:[0-1]"), S(0), shape=(5,))


def test_pieces_tell_the_order_of_dims_in_memory() -> None:
    columns, rows = torch.ones(3, 2).T, torch.ones(2, 3)
    line = flow.placement("cpu:[0-1]")
    assert flow.boxing.layout_of([columns, columns], line, S(0)).strides == (1, 4)
    assert flow.boxing.layout_of([columns, rows], line, S(0)).strides == (1, 4)
    assert flow.boxing.layout_of([torch.ones(2, 6)[:, :3]] * 2, line, S(0)).gaps
    assert flow.boxing.layout_of([torch.ones(2, 5, 3)[:, :4]] * 2, line, S(0)).strides == (24, 3, 1)
