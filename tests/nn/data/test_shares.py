"""Rows and tokens of a batch that ranks hold: each once over the axes that cut them, in equal parts."""

import numpy as np
import pytest
import torch

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.nn.data.shares import shares_of
from sbpflow.placement.errors import SbpError

GRID = flow.placement("cpu:[0-3] as (data=2, context=2)")


@pytest.mark.parametrize("size", [0, 1, 5, 8], ids=["none", "fewer than ranks", "uneven", "even"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ranks_hold_each_row_once(size: int, micro_batches: int) -> None:
    made = shares_of(GRID, {"data": S(0)}, micro_batches, 8)
    rows = [x for rank in (0, 2) for lo, hi in made.rows_of(rank, size) for x in range(lo, hi)]
    assert sorted(rows) == list(range(size)) == made.rows(size).tolist()
    assert made.rows_of(0, size) == made.rows_of(1, size)


def test_micro_batches_of_one_size_are_shared_out_each_by_itself() -> None:
    made = shares_of(GRID, {"data": S(0)}, 2, 8)
    assert made.rows_of(0, 8) == ((0, 2), (4, 6))
    assert made.rows_of(0, 7) == ((0, 4),)
    assert made.layout((8, 3), torch.int64).lie == "(S(0), B) [dim 0: all 2, data]"


def test_a_tensor_lies_as_far_as_it_has_the_dims() -> None:
    made = shares_of(GRID, (S(0), S(1)), 1, 4)
    assert made.layout((4, 6), torch.int64).sbp == (S(0), S(1))
    assert made.layout((4,), torch.int64).sbp == (S(0), B)
    assert made.part(7) == (0, 7)  # of all ranks that this process plays


def test_a_shard_is_cut_of_what_was_read() -> None:
    made = shares_of(GRID, (S(0), S(1)), 1, 4)
    whole = torch.arange(20).reshape(4, 5)
    of = made.layout((4, 5), whole.dtype)
    for rank in range(4):
        assert torch.equal(made.shard(whole, of, rank, np.arange(4), (0, 0)), whole[of.slices(rank)])
    right = whole[2:, 3:]  # as a process that is rank 3 alone reads it
    assert torch.equal(made.shard(right, of, 3, np.arange(2, 4), (3, 5)), right)


def test_what_no_batch_can_be_is_refused() -> None:
    with pytest.raises(SbpError, match=r"a batch is no sum of addends(?s:.*)say S\(0\)"):
        shares_of(GRID, (P, B), 1, 4)
    with pytest.raises(SbpError, match="count dims from the front"):
        shares_of(GRID, (S(-1), B), 1, 4)
    with pytest.raises(SbpError, match=r"over 2 ranks in 4 micro-batches(?s:.*)give it 8 or a multiple"):
        shares_of(GRID, (S(0), B), 4, 4)
    with pytest.raises(SbpError, match="one entry an axis"):
        shares_of(GRID, S(0), 1, 4)
