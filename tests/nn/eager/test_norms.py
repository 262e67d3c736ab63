"""Norms of gradients: those of one device, in one move for all of them."""

# mypy: disallow-untyped-calls=False

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import sbpflow as flow
from sbpflow import B, P, S
from sbpflow.sbp import Sbp
from tests.ranks import Ranks

LINE, GRID = flow.placement("cpu", range(4)), flow.placement("cpu", [[0, 1], [2, 3]])
LEFT, RIGHT = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])
LIES: list[Sbp] = [B, S(0), P]
ORDERS = [2.0, 1.0, 3.0, 0.5, math.inf, -math.inf, 0.0, -1.0]
VALUES = [
    torch.linspace(-1, 3, 30).reshape(5, 6),
    torch.arange(7.0),
    torch.zeros(3, 2),
    torch.ones(1, 3),  # fewer rows than ranks
    torch.full((4,), 300.0, dtype=torch.float16),  # whose squares are infinite
    torch.linspace(1, 2, 3, dtype=torch.float64),
    torch.ones(4, 2, dtype=torch.complex64) * (3 + 4j),
]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(
    ("where", "sbp"),
    [(at, sbp) for at in (LINE, GRID, flow.placement("cpu", [2])) for sbp in itertools.product(LIES, repeat=at.ndim)],
    ids=str,
)
def test_norms_of_a_list_are_those_of_one_device(where: flow.Placement, sbp: tuple[Sbp, ...], ord: float) -> None:
    held = [flow.tensor(v, placement=where, sbp=sbp) for v in VALUES]
    for x, one in zip(torch._foreach_norm(held, ord), torch._foreach_norm(VALUES, ord), strict=True):  # type: ignore[arg-type]
        assert isinstance(x, flow.GlobalTensor)
        assert (x.dtype, x.shape) == (one.dtype, one.shape)
        tolerance = 1e-2 if one.dtype is torch.float16 else 1e-4  # sums are reordered
        assert torch.allclose(x.full_tensor(), one, tolerance)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def clipped(at: int | None, ord: float = 2.0, foreach: bool | None = None) -> tuple[list[Tensor], int]:
    """The norm and the gradients after it, and how often something was sent."""
    model, x = net(), torch.linspace(-1, 1, 24).reshape(4, 6)
    if at == 3:  # stages
        flow.nn.to_global(model[:2], LEFT, S(0))
        flow.nn.to_global(model[2:], RIGHT, S(0))
        h = model[:2](flow.tensor(x, placement=LEFT, sbp=B))
        y = model[2:](h.to_global(placement=RIGHT, sbp=B))
    else:
        lies: Any = [(LINE, S(0)), (LINE, {"*.weight": S(1)}), (GRID, {"*.weight": (S(0), S(1)), "*.bias": (B, S(0))})]
        if at is not None:
            where, sbp = lies[at]
            flow.nn.to_global(model, where, sbp)
            x = flow.tensor(x, placement=where, sbp=B)
        y = model(x)
    y.square().sum().backward()
    with flow.record() as moves:
        norm = clip_grad_norm_(model.parameters(), 0.1, ord, foreach=foreach)
    found = [norm, *(w.grad for w in model.parameters())]
    whole = [x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in found]
    return whole, sum(move.bytes > 0 for move in moves)  # type: ignore[return-value]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("ord", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("at", range(3))
def test_clipping_sends_once_for_all_parameters(at: int, ord: float) -> None:
    found, sent = clipped(at, ord)
    assert same(found, clipped(None, ord)[0])
    assert sent == 1


def test_clipping_one_by_one_sends_once_for_each() -> None:
    found, sent = clipped(0, foreach=False)
    assert same(found, clipped(None)[0])
    assert sent == 8


def test_gradients_on_several_placements_are_clipped_together() -> None:
    assert same(clipped(3)[0], clipped(None)[0])
    assert same(clipped(3, foreach=False)[0], clipped(None)[0])


def test_gradients_are_clipped_together_on_ranks(ranks4: Ranks) -> None:
    for at in range(4):
        for found, _ in ranks4(clipped, at):
            assert same(found, clipped(None)[0])


def test_values_of_gradients_are_clipped_together() -> None:
    model, plain = net(), net()
    flow.nn.to_global(model[:2], LEFT, S(0))
    flow.nn.to_global(model[2:], RIGHT, B)
    for one in (model, plain):
        for w in one.parameters():
            w.grad = torch.ones_like(w)
        clip_grad_value_(one.parameters(), 0.5)
    for w in (*model.parameters(), *plain.parameters()):
        assert w.grad is not None
        assert (w.grad == 0.5).all()
