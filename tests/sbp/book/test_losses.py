"""Losses: sums over ranks, means over the logical count, whatever pieces ranks hold."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.sbp.check import check_rule

torch.manual_seed(1)  # not 0, with which each test begins: the checker draws addends, which must not be these numbers
F64 = torch.float64
X, Y, P = torch.randn(5, 2, dtype=F64), torch.randn(5, 2, dtype=F64), torch.rand(5, 2, dtype=F64)
W, SIGN = torch.rand(2, dtype=F64), torch.tensor([1.0, -1, -1, 1, -1], dtype=F64)
LOGITS, CLASSES = torch.randn(5, 4, 3, dtype=F64), (torch.arange(15).reshape(5, 3) * 7 + 2) % 4
PAIRS: list[tuple[Any, ...]] = [
    ("mse_loss", X, Y), ("l1_loss", X, Y[:, :1]), ("l1_loss", X, Y), ("smooth_l1_loss", X, Y), ("huber_loss", X, Y),
    ("binary_cross_entropy", P, P.flip(0), W), ("binary_cross_entropy", P, P.flip(0)), ("kl_div", X, P),
    ("binary_cross_entropy_with_logits", X, P, None, W), ("binary_cross_entropy_with_logits", X, P, W),
    ("soft_margin_loss", X, SIGN[:, None] * SIGN[:2]), ("margin_ranking_loss", X, Y, SIGN[:, None]),
    ("hinge_embedding_loss", X, SIGN[:, None]), ("multi_margin_loss", LOGITS[..., 0], CLASSES[:, 0]),
    ("multi_margin_loss", LOGITS[..., 0], CLASSES[:, 0], 1, 1, torch.rand(4, dtype=F64)),
    ("multilabel_margin_loss", LOGITS[..., 0], torch.tensor([[3, 0, -1, 1]] * 5)),
    ("cosine_embedding_loss", LOGITS[..., 0], LOGITS[..., 1], SIGN),
    ("triplet_margin_loss", LOGITS[..., 0], LOGITS[..., 1], LOGITS[..., 2]), ("triplet_margin_loss", X[0], Y[0], X[1]),
    ("cross_entropy_loss", LOGITS, LOGITS.softmax(1).flip(0)),
    ("cross_entropy_loss", X[0], P[0]),
]  # fmt: skip
CLASSED: list[tuple[str, Tensor, Tensor]] = [
    ("cross_entropy_loss", LOGITS, CLASSES), ("cross_entropy_loss", LOGITS[0, :, 0], CLASSES[0, 0]),
    ("nll_loss_nd", LOGITS, CLASSES), ("nll_loss_nd", LOGITS[..., 0], CLASSES[:, 0]),
]  # fmt: skip


@pytest.mark.sampled(30)
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("call", PAIRS, ids=lambda call: call[0])
def test_the_rule_is_right_and_complete(call: tuple[Any, ...], reduction: int) -> None:
    report = check_rule(*call, reduction=reduction)
    assert not report.wrong
    assert not report.missing


@pytest.mark.parametrize(
    ("call", "reduction"), list(product(CLASSED, [0, 2])), ids=lambda x: x[0] if isinstance(x, tuple) else None
)
def test_classes_stay_whole(call: tuple[str, Tensor, Tensor], reduction: int) -> None:
    weight = torch.rand(4, dtype=F64)
    for report in (
        check_rule(*call, reduction=reduction),
        check_rule(*call, weight, reduction=reduction, ignore_index=1),
    ):
        assert not report.wrong
        assert not report.missing


def test_the_book_is_silent_where_only_all_ranks_know_the_count() -> None:
    for call in CLASSED:
        assert check_rule(*call).wrong == ["the book has no rule for this call"]


def test_poisson() -> None:
    for reduction in (0, 1, 2):
        assert not check_rule("poisson_nll_loss", X, P, True, True, 1e-8, reduction).wrong
