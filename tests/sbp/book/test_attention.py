"""Attention: batch, heads, query rows and value width split."""

from typing import Any

import pytest
import torch

from sbpflow.sbp.check import check_rule
from sbpflow.sbp.trial import Trial

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
SDPA = "scaled_dot_product_attention"
Q, K, V = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(2, 3, 6, 4, dtype=F64), torch.randn(2, 3, 6, 2, dtype=F64)
SQUARE, MASK = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(5, 6, dtype=F64)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((Q[0], K[0], V[0]), {}), ((Q[0], SQUARE[0], SQUARE[0] + 1), {"is_causal": True}),
    ((Q[:, 0], K[:, 0], V[:, 0], MASK), {}), ((Q[:, 0], K[:, 0], V[:, 0], MASK[:1] > -1), {}),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs"), CALLS, ids=["plain", "causal", "mask", "mask_of_columns"])
def test_the_rule_is_right_and_complete(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    report = check_rule(SDPA, *args, **kwargs)
    assert not report.wrong
    assert not report.missing


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Q, K, V), {}), ((Q, K, V, MASK.expand(2, 1, 5, 6)), {}), ((Q, K, V, MASK.expand(3, 5, 6) * 1), {}),
        ((torch.randn(2, 6, 5, 4, dtype=F64), K, V), {"enable_gqa": True}),
        ((torch.randn(2, 6, 5, 4, dtype=F64), K, V, torch.randn(6, 5, 6, dtype=F64)), {"enable_gqa": True}),
        ((Q, K[:, :1], V[:, :1]), {"enable_gqa": True}), ((Q, K[:1], V[:1]), {}),
    ],
)  # fmt: skip
def test_the_rule_is_right(args: Any, kwargs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "tries", lambda *_: [])  # complete above, and there are many signatures
    assert not check_rule(SDPA, *args, **kwargs).wrong


def test_with_dropout_the_book_is_silent() -> None:
    assert check_rule(SDPA, Q, K, V, dropout_p=0.5).wrong == ["the book has no rule for this call"]
