"""Permuting, squeezing, expanding, repeating: right and complete."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64, C128 = torch.float64, torch.complex128
X, LINE = torch.randn(4, 3, 6, dtype=F64), torch.randn(5, dtype=F64)
ONES = torch.randn(1, 4, 1, 3, dtype=F64)
CALLS: list[tuple[Any, ...]] = [
    ("permute", X, (2, 0, -2)), ("transpose.int", X, 0, -1), ("t", X[0]), ("mT", X), ("mH", X), ("numpy_T", X),
    ("swapaxes", X, 0, 1), ("movedim.int", X, 0, 2), ("movedim.intlist", X, (0, 1), (-1, 0)),
    ("adjoint", torch.randn(2, 3, 4, dtype=C128)),
    ("unsqueeze", X, -2), ("unsqueeze", X, 0), ("squeeze", ONES), ("squeeze.dim", ONES, 1), ("squeeze.dim", ONES, 0),
    ("squeeze.dims", ONES, (0, 2)), ("squeeze.dims", ONES, (1, 2)), ("squeeze", X),
    ("expand", ONES, (5, 2, 4, 3, -1)), ("expand", X, (2, 4, 3, 6)), ("broadcast_to", LINE, (3, 5)),
    ("repeat", X, (2, 1, 2, 1)), ("tile", X, (3, 1)), ("repeat_interleave.self_int", X, 2, 1),
    ("repeat_interleave.self_int", torch.randn(6, dtype=F64), 3), ("repeat", X, (3, 1, 1)),
    ("diagonal", X), ("diagonal", X, -1, 2, 0), ("diag_embed", X, 1, 0, 2),
    ("flip", X, (0, -1)), ("roll", X, [1], [2]), ("roll", X, (1, 2), (0, 1)), ("fliplr", X), ("flipud", X),
    ("unfold", X, -1, 2, 1),
    ("view.dtype", X, torch.int64), ("view.dtype", X[..., :5].contiguous(), torch.float32),
    ("detach", X), ("contiguous", X), ("tril", X), ("triu", X, 1), ("view_as_complex", X[..., :2].contiguous()),
    ("view_as_real", torch.randn(4, 3, dtype=C128)), ("alias", X),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...]) -> None:
    report = check_rule(*call)
    assert not report.wrong
    assert not report.missing


EXPANDED = [(ONES, X.new_ones(5, 4, 2, 3)), (LINE[:1], X), (X[0], X), (X[:, :1], X)]


@pytest.mark.parametrize("call", EXPANDED, ids=lambda call: str(tuple(call[0].shape)))
def test_a_tensor_grows_as_another_is_split(call: tuple[Any, ...]) -> None:
    """The other is there for its shape: it may be anything whole."""
    report = check_rule("expand_as", *call)
    assert not report.wrong
    assert {text.rpartition(" on ")[0] for text in report.missing} <= {"B, P -> B", 'B, P("max") -> B'}


def test_tensors_broadcast_together() -> None:
    """Each is linear on its own, which a match cannot say, so that some signatures are missing."""
    report = check_rule("broadcast_tensors", [X, LINE[:3, None], LINE[:1]])
    assert not report.wrong
    assert all("S" not in text for text in report.missing)
