"""Attention: batch, heads, query rows and value width split."""

from math import prod
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.sbp import Sbp
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
        ((torch.randn(2, 6, 5, 4, dtype=F64), K[:, :2], V[:, :2]), {"enable_gqa": True}),
        ((torch.randn(2, 8, 5, 4, dtype=F64), K[:, :2], V[:, :2]), {"enable_gqa": True}),
        ((torch.randn(1, 8, 3, 4, dtype=F64), K[:1].repeat(1, 2, 1, 1)[:, :4], V[:1].repeat(1, 2, 1, 1)[:, :4],
          torch.randn(8, 3, 6, dtype=F64)), {"enable_gqa": True}),
        ((Q, K[:, :1], V[:, :1]), {"enable_gqa": True}), ((Q, K[:1], V[:1]), {}),
    ],
)  # fmt: skip
def test_the_rule_is_right(args: Any, kwargs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trial, "tries", lambda *_: [])  # complete above, and there are many signatures
    assert not check_rule(SDPA, *args, **kwargs).wrong


def test_with_dropout_the_book_is_silent() -> None:
    assert check_rule(SDPA, Q, K, V, dropout_p=0.5).wrong == ["the book has no rule for this call"]


@pytest.mark.parametrize(
    ("grid", "heads", "keys"),
    [((2, 2), 2, S(1)), ((2, 2), 6, S(1)), ((3, 2), 4, S(1)), ((2, 4), 2, B), ((2, 3), 2, B)],
    ids=str,
)
def test_grouped_heads_under_data_and_tensor_parallel_move_nothing(
    grid: tuple[int, int], heads: int, keys: Sbp
) -> None:
    where = flow.placement("cpu", torch.arange(prod(grid)).reshape(grid).tolist())
    q, k, v = (torch.randn(6, n, 5, 4, dtype=F64, requires_grad=True) for n in (12, heads, heads))
    rest = {"is_causal": True, "enable_gqa": True}
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, **rest)  # type: ignore[arg-type]
    moved = [
        flow.tensor(x.detach(), placement=where, sbp=(S(0), how), requires_grad=True)
        for x, how in ((q, S(1)), (k, keys), (v, keys))
    ]
    with flow.explicit():
        found: flow.GlobalTensor = torch.nn.functional.scaled_dot_product_attention(*moved, **rest)  # type: ignore[arg-type, assignment]
    assert found.sbp == (S(0), S(1))
    torch.testing.assert_close(found.full_tensor(), wanted)
    ours = torch.autograd.grad(found.sum(), moved)
    for mine, theirs in zip(ours, torch.autograd.grad(wanted.sum(), (q, k, v)), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        torch.testing.assert_close(mine.full_tensor(), theirs)
