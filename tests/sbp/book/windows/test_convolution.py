"""Convolutions: samples, channels and groups."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
LINE, PLANE, CUBE = (torch.randn(shape, dtype=F64) for shape in ((3, 5, 7), (2, 3, 5, 7), (3, 2, 3, 4, 5)))
W1, W2, W3 = (torch.randn(shape, dtype=F64) for shape in ((4, 5, 3), (4, 3, 3, 2), (3, 2, 2, 2, 2)))
BIAS = torch.randn(4, dtype=F64)
SIX = torch.randn(2, 6, 5, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("conv1d", LINE, W1, BIAS), ("conv1d", LINE[0], W1), ("conv2d", PLANE, W2, BIAS, [2, 1], [1, 0]),
    ("conv2d.padding", PLANE, W2, None, [1, 1], "same"), ("conv3d", CUBE, W3),
    ("conv_transpose1d", LINE, W1.transpose(0, 1), BIAS),
    ("conv_transpose2d.input", PLANE, W2.transpose(0, 1), BIAS, [2, 2]),
    ("convolution", LINE, W1, BIAS, [1], [1], [1], False, [0], 1),
    ("convolution", LINE, W1.transpose(0, 1), BIAS, [2], [1], [1], True, [1], 1),
    ("conv1d", SIX, torch.randn(12, 1, 2, dtype=F64), None, [1], [0], [1], 6),
    ("conv1d", SIX, torch.randn(6, 1, 2, dtype=F64), torch.randn(6, dtype=F64), [1], [0], [1], 6),
    ("conv1d", SIX[:, :5], torch.randn(5, 1, 2, dtype=F64), None, [1], [0], [1], 5),
    ("conv_transpose1d", SIX, torch.randn(6, 2, 2, dtype=F64), None, [1], [0], [0], 6),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch 2.15 says so for what 2.13 does not
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing


def test_groups_that_do_not_come_out_even_stay_whole() -> None:
    """Two groups of channels on three ranks: no rank has whole groups only, but each may have some of the samples."""
    report = check_rule("conv1d", SIX, torch.randn(4, 3, 2, dtype=F64), groups=2)
    assert not report.wrong
    assert not report.missing
