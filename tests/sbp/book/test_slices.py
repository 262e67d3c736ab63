"""Slices and single indices: split dims add up to the part, all others pass."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X = torch.randn(5, 4, 6, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("slice.Tensor", X, 0, 1, 4), ("slice.Tensor", X, 0, -2), ("slice.Tensor", X, 1, 0, 4, 3),
    ("slice.Tensor", torch.randn(7, dtype=F64), 0, 1, 100, 3), ("slice.Tensor", X, 1, 0, 9223372036854775807),
    ("slice.Tensor", X, -1, None, -4),
    ("slice.Tensor", X, 0, 3, 3), ("slice.Tensor", torch.arange(7), 0, 4), ("slice.Tensor", X > 0, 1, 2),
    ("slice.Tensor", X, 1, -100, 2), ("narrow", X, 1, 2, 2), ("narrow", X, 2, 0, 6),
    ("select.int", X, 0, 0), ("select.int", X, 1, -1), ("select.int", X, -1, 4),
    ("select.int", torch.arange(6) != 1, 0, 1),
    ("slice_scatter", X, torch.randn(5, 2, 6, dtype=F64), 1, 1, 3), ("select_scatter", X, X[0] * 2, 0, 3),
    ("diagonal_scatter", X, torch.randn(6, 4, dtype=F64), 0, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing
