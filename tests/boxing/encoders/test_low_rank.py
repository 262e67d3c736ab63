"""Factors of low rank, in whatever precision the matrix is."""

import pytest
import torch

import sbpflow as flow
from sbpflow import P
from sbpflow.boxing.encoders.low_rank import HALVES, orthogonal


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_columns_in_half_precision_are_orthogonal_though_their_squares_overflow(
    dtype: torch.dtype, columns: int
) -> None:
    """Sums of squares of 300 are beyond float16, and half a column of ones is what is left of it in bfloat16."""
    drawn = torch.randn(512, columns, generator=torch.Generator().manual_seed(0)) * 30 + 300
    made = orthogonal(drawn.to(dtype))
    assert made.dtype is dtype
    torch.testing.assert_close(made.double().T @ made.double(), torch.eye(columns).double(), atol=2e-2, rtol=0)


def test_what_depends_on_columns_before_is_zero() -> None:
    column = torch.arange(1.0, 5.0, dtype=torch.float16)
    assert not orthogonal(torch.stack([column, column * 0], 1))[:, 1].any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_sum_of_rank_one_in_half_precision_comes_back(dtype: torch.dtype) -> None:
    one = (torch.arange(1.0, 17)[:, None] * torch.arange(1.0, 13) / 16).to(dtype)
    x = flow.from_local([one, one * 3], placement=flow.placement("cpu", range(2)), sbp=P)
    come = x.to_global(sbp=flow.B, encoder=flow.encoders.low_rank(rank=1))
    assert come.dtype is dtype
    torch.testing.assert_close(come.full_tensor(), one * 4, rtol=2e-2, atol=2e-2)
