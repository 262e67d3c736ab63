"""Batch norm: channels split while it learns its statistics, samples too once they are given."""

import pytest
import torch
from torch import Tensor

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X, W, B, MEAN = (torch.randn(shape, dtype=F64) for shape in ((5, 3, 4), (3,), (3,), (3,)))
VAR = torch.rand(3, dtype=F64) + 0.5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("weight", "bias"), [(W, B), (None, None), (W, None)], ids=["affine", "plain", "scaled"])
def test_the_rule_is_right_and_complete(weight: Tensor | None, bias: Tensor | None, training: bool) -> None:
    report = check_rule("batch_norm", X, weight, bias, MEAN, VAR, training, 0.1, 1e-5, False)
    assert not report.wrong
    assert not report.missing


def test_images_without_running_statistics() -> None:
    report = check_rule("batch_norm", torch.randn(2, 3, 2, 2, dtype=F64), W, B, None, None, True, 0.1, 1e-5, False)
    assert not report.wrong
    assert not report.missing
