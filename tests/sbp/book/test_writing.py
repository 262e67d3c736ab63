"""Writing by index: what is added may be split, dims that are not written to pass."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X = torch.randn(5, 4, 6, dtype=F64)
I3, I23 = torch.tensor([4, 0, 3]), torch.tensor([[0, 3, 1], [2, 0, 3]])
ROWS = torch.randn(3, 4, 6, dtype=F64)
AT = torch.tensor([[3, 0], [1, 2], [0, 3], [2, 2], [3, 1]]).unsqueeze(-1).expand(5, 2, 6)
SRC = torch.randn(5, 2, 6, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("index_put", X, [I3], ROWS), ("index_put", X, [I3], ROWS[0], True), ("index_put", X, [I3], ROWS, True),
    ("index_put", X, [None, I23 % 3], torch.randn(2, 3, 6, dtype=F64)), ("index_put_", X, [I3], ROWS[:, :1]),
    ("index_put", X, [I23, None, I23], torch.randn(2, 3, 4, dtype=F64), True),
    ("index_put", X, [I3], torch.randn((), dtype=F64)),
    ("index_put", X, [X > 0], torch.randn((), dtype=F64)),
    ("index_put", X, [None, X[0] > 0], torch.tensor(2.0, dtype=F64)),
    ("index_add", X, 0, I3, ROWS), ("index_add_", X, 0, I3, ROWS), ("index_copy", X, 0, I3, ROWS),
    ("index_copy_", X, -1, I3, X[..., :3] + 1), ("scatter_add", X, 1, AT, SRC), ("scatter_add_", X, 1, AT, SRC),
    ("scatter.src", X, 1, AT, SRC), ("scatter.src", X, 1, AT[:4], SRC[:4]),
    ("scatter_reduce.two", X, 1, AT, SRC, "sum"),
    ("scatter_reduce.two", X, 1, AT, SRC, "amax"), ("scatter.value", X, 1, AT, 2.0),
    ("index_fill.int_Scalar", X, 1, I3 % 4, 3.0),
    ("index_fill.int_Tensor", X, 1, I3 % 4, torch.tensor(3.0, dtype=F64)),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing
