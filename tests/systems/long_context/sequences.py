"""Attention of sequences in pieces beside that of one device, on every rank, and what it sends."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import sbpflow as flow
from tests.nn.composites.ring import F64, Attends, numbers, weighed

__all__ = ["F64", "attended", "close_on_every_rank", "numbers", "sent", "shards", "three"]


def three(
    length: int, *, heads: int = 4, shared: int | None = None, keys: int | None = None, width: int = 4
) -> list[Tensor]:
    shapes = [(2, heads, length, width), *[(2, shared or heads, keys or length, width)] * 2]
    return [numbers(*shape, seed=n) for n, shape in enumerate(shapes)]


def attended(
    grid: str,
    use: str,
    over: Any,
    given: Sequence[Tensor],
    lies: Sequence[Any],
    mask: Tensor | None = None,
    tolerance: float = 1e-11,
    **how: Any,
) -> list[tuple[str, int]]:
    """One step against one device: loss, result and all gradients. The moves that send something, with their bytes."""
    where = flow.placement(grid)
    query, _, value = given
    model = Attends(query.shape[-1], query.dtype, **how)
    alone = copy.deepcopy(model)
    flow.nn.inside(model.attention, use=use, over=over)
    by = numbers(*query.shape[:-1], value.shape[-1], seed=9)
    plain = [x.clone().requires_grad_() for x in given]
    laid: list[Any] = [
        flow.tensor(x.detach(), placement=where, sbp=sbp).requires_grad_() for x, sbp in zip(plain, lies, strict=True)
    ]
    hides = None if mask is None else flow.tensor(mask, placement=where, sbp="B")
    step = flow.compile(model, weighed, placement=where)
    with flow.record() as moves:
        loss: Any = step(*laid, by, hides)
    want = weighed(alone, *plain, by, mask)
    want.backward()  # type: ignore[no-untyped-call]
    learnt: Any = model.scale.grad
    close_on_every_rank(
        [loss, *(x.grad for x in laid), learnt], [want.detach(), *(x.grad for x in plain), alone.scale.grad], tolerance
    )
    with torch.no_grad():
        result: Any = flow.compile(model, placement=where)(*laid, hides)
        close_on_every_rank([result], [alone(*plain, mask)], tolerance)
    return sent(moves)


def close_on_every_rank(found: Sequence[Any], want: Sequence[Any], tolerance: float = 1e-11) -> None:
    """Not of the first rank alone: what several ranks have is the same on each."""
    for mine, other in zip(found, want, strict=True):
        mine = mine.to_global(sbp="B") if "P" in str(mine.sbp) else mine
        pieces = flow.tensor(other.detach(), placement=mine.placement, sbp=mine.sbp)
        for here, there in zip(shards(mine), shards(pieces), strict=True):
            torch.testing.assert_close(here, there, rtol=tolerance, atol=tolerance)


def shards(x: Any) -> list[Tensor]:
    """Those that this process has."""
    held = x.to_local()
    return list(held) if isinstance(held, list | tuple) else [held]


def sent(moves: Any) -> list[tuple[str, int]]:
    return [(move.boxing.route, move.boxing.total) for move in moves if move.boxing.total]
