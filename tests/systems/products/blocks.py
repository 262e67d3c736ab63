"""A layer whose weight lies in blocks beside the same on one device, and what its product sends."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import sbpflow as flow
from sbpflow import S
from tests.nn.composites.products import weighed
from tests.nn.composites.ring import F64, numbers

Entries = Mapping[str, Any]


def linear(inner: int, out: int, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inner, out, bias=bias, dtype=F64)


def trained(
    model: nn.Module, grid: str, use: str, over: Sequence[str], rests: Entries, lies: Entries, *shape: int
) -> list[tuple[str, int]]:
    """One step against one device; the moves of it that send something, with their bytes, and the shapes of weights."""
    where, alone = flow.placement(grid), copy.deepcopy(model)
    flow.nn.inside(model, use=use, over=over)
    flow.nn.shard(model, {"weight": rests})
    x = numbers(*shape)
    by = numbers(*shape[:-1], alone(x).shape[-1], seed=1)
    laid = flow.tensor(x, placement=where, sbp=lies).requires_grad_()
    step = flow.compile(model, weighed, placement=where)
    with flow.record() as moves:
        loss: Any = step(laid, flow.tensor(by, placement=where, sbp="B"))
    x.requires_grad_()
    want = weighed(alone, x, by)
    want.backward()  # type: ignore[no-untyped-call]
    pairs: list[tuple[Any, Any]] = [(laid, x), *zip(model.parameters(), alone.parameters(), strict=True)]
    torch.testing.assert_close(loss.full_tensor(), want.detach(), rtol=1e-11, atol=1e-11)
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.full_tensor(), other.grad, rtol=1e-11, atol=1e-11)
    return [(move.boxing.route, move.boxing.total) for move in moves if move.boxing.total]


def total(moves: Sequence[tuple[str, int]], *routes: str) -> int:
    return sum(nbytes for route, nbytes in moves if route in routes)


def count(moves: Sequence[tuple[str, int]]) -> Counter[str]:
    return Counter(route for route, _ in moves)


def shares(model: nn.Module) -> set[int]:
    """The elements of the weight that each rank has."""
    weight: Any = model.weight
    return {piece.numel() for piece in weight.to_local()}


SQUARE: Entries = {"row": S(0), "col": S(1)}  # of x and the result
BLOCKS: Entries = {"row": S(1), "col": S(0)}  # of the weight of nn.Linear
