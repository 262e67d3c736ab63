"""Counts: every rank counts its own, and what ranks have adds up."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
X = torch.randn(4, 6, dtype=torch.float64)
CALLS: list[tuple[Any, ...]] = [
    ("histc", X, 4, -2, 2),
    ("histc", X, 3, 0, 0),
    ("histc", X[0], 2, -1, 1),
    ("histc", X, 5),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.missing
    assert report.wrong == ([] if call[3:] and call[3] != call[4] else ["the book has no rule for this call"])
