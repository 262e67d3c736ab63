"""OneFlow's spellings: factories after another tensor, calls without arguments, copies between placements."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.placement.errors import SbpError

LINE, PAIR = flow.placement("cpu", range(4)), flow.placement("cpu", [4, 5])
GRID = flow.placement("cpu", [[0, 1], [2, 3]])
X = torch.arange(12.0).reshape(4, 3)
LIKE: dict[str, tuple[Callable[..., Any], Callable[[Tensor], Tensor]]] = {
    "zeros_like": (flow.zeros_like, torch.zeros_like),
    "ones_like": (flow.ones_like, torch.ones_like),
    "rand_like": (flow.rand_like, torch.rand_like),
    "randn_like": (flow.randn_like, torch.randn_like),
    "full_like": (lambda x, **k: flow.full_like(x, 3.0, **k), lambda x: torch.full_like(x, 3.0)),
    "randint_like": (
        lambda x, **k: flow.randint_like(x, 0, 9, **k),
        lambda x: torch.randint(0, 9, x.shape, dtype=x.dtype),
    ),
}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_made_like_another_lies_where_it_is_told(name: str) -> None:
    made, plain = LIKE[name]
    x = flow.tensor(X, placement=LINE, sbp=S(0))
    for given, where, sbp in ((x, PAIR, S(1)), (x, GRID, (S(0), B)), (X, PAIR, B), (x, None, None)):
        torch.manual_seed(1)
        wanted = plain(X)
        torch.manual_seed(1)
        y = made(given, placement=where, sbp=sbp)
        assert torch.equal(y.full_tensor(), wanted)
        assert (y.placement, y.sbp) == (
            (where, sbp if isinstance(sbp, tuple) else (sbp,)) if where else (LINE, (S(0),))
        )


def test_after_a_plain_tensor_the_placement_must_be_told() -> None:
    with pytest.raises(SbpError, match="give placement= and sbp="):
        flow.zeros_like(X)
    assert flow.empty_like(flow.ones(3, placement=LINE, sbp=P)).sbp == (B,)


def test_windows_and_spaces_are_those_of_torch() -> None:
    for sbp in (S(0), B, P):
        window = flow.hann_window(7, placement=LINE, sbp=sbp)
        space = flow.logspace(0, 2, 5, base=2.0, placement=LINE, sbp=sbp, requires_grad=True)
        drawn = flow.normal(1.0, 2.0, (5, 3), placement=LINE, sbp=sbp, seed=4)
        assert torch.equal(window.full_tensor(), torch.hann_window(7))
        assert torch.equal(space.full_tensor(), torch.logspace(0, 2, 5, base=2.0))
        wanted = torch.normal(1.0, 2.0, (5, 3), generator=torch.Generator().manual_seed(4))
        assert torch.equal(drawn.full_tensor(), wanted)
        assert space.requires_grad


def test_signatures_may_be_called() -> None:
    assert flow.sbp.broadcast() is B
    assert flow.sbp.partial_sum() is P
    assert flow.ones(4, placement=LINE, sbp=flow.sbp.broadcast()).sbp == (B,)


@pytest.mark.parametrize("sbp", [S(0), S(1), B, P], ids=str)
@pytest.mark.parametrize("grad_sbp", [B, P, S(0), S(1)], ids=str)
def test_a_gradient_may_come_back_by_any_signature(sbp: Any, grad_sbp: Any) -> None:
    x = flow.tensor(X, placement=LINE, sbp=S(1), requires_grad=True)
    y = x.to_global(sbp=sbp, grad_sbp=grad_sbp)
    (y * y).sum().backward()
    assert y.sbp == (sbp,)
    assert torch.equal(x.grad.full_tensor(), 2 * X)  # type: ignore[union-attr]


@pytest.mark.parametrize("sbp", [S(0), S(1), B], ids=str)
def test_a_copy_between_placements_moves(sbp: Any) -> None:
    for where in (PAIR, GRID):
        to = flow.zeros(4, 3, placement=LINE, sbp=S(0))
        x = flow.tensor(X, placement=where, sbp=(sbp,) * where.ndim, requires_grad=True)
        assert to.copy_(x) is to
        assert (to.placement, to.sbp) == (LINE, (S(0),))
        to.mul(2).sum().backward()
        assert torch.equal(to.full_tensor(), X)
        assert torch.equal(x.grad.full_tensor(), torch.full((4, 3), 2.0))  # type: ignore[union-attr]
