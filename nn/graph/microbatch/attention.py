"""Attention in slices of a sequence: queries of one slice, and keys and values of it and all earlier ones.

A slice leaves its keys and values behind for later ones, and later ones leave the gradients that they have for these.
So forward goes from the first slice of a sequence to the last, and backward from the last to the first. Keys, values
and gradients lie here under a number, which an op gets with the place of its slice: `past` holds these two.
"""

import math
from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .attention_blocks import back, seen

__all__ = ["attend", "forget", "reserved"]


class Past:
    """The past of a sequence on one rank, from all its slices: keys and values, and their gradients by later slices."""

    def __init__(self, key: Tensor, value: Tensor, length: int) -> None:
        def room(x: Tensor) -> Tensor:
            return x.new_empty((*x.shape[:-2], length, x.shape[-1]))

        self.key, self.value = room(key), room(value)
        self.gradients: tuple[Tensor, Tensor] | None = None

    def until(self, last: int) -> tuple[Tensor, Tensor]:
        return self.key[..., :last, :], self.value[..., :last, :]


_pasts: dict[int, Past] = {}
_free = count()


def reserved() -> int:
    """The first of many numbers, one for each rank that there may be, under which nothing lies yet."""
    return next(_free) << 32


def forget(held: Iterable[int]) -> None:
    """Lets go of what lies under these numbers, if it is still there."""
    for number in held:
        _pasts.pop(number, None)


@torch.library.custom_op("sbpflow::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    mask: Tensor | None,
    length: int,
    scale: float,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """The attention of a slice, and the logarithms of the sums of its weights; `mask` has its rows, and all columns."""
    held, first = past.tolist()
    last = first + query.shape[-2]
    store = _pasts.get(held)
    if store is None:
        store = _pasts[held] = Past(key, value, length)
    store.key[..., first:last, :] = key
    store.value[..., first:last, :] = value
    keys, values = store.until(last)
    if last == length and not trains:
        forget([held])
    return seen(query, keys, values, _bias(query, first, last, mask), scale)


@torch.library.custom_op("sbpflow::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a slice's query, key and value, those of later slices included."""
    held, first = past.tolist()
    last = first + query.shape[-2]
    store = _pasts[held]
    keys, values = store.until(last)
    dquery, dkeys, dvalues, _ = back(grad, query, keys, values, _bias(query, first, last, mask), out, sums, scale)
    if store.gradients is None:  # the last slice goes back first
        store.gradients = torch.zeros_like(store.key), torch.zeros_like(store.value)
    mine = []
    for total, more in zip(store.gradients, (dkeys, dvalues), strict=True):
        total[..., :last, :] += more
        mine.append(total[..., first:last, :].clone())
    if first == 0:
        forget([held])
    return dquery, mine[0], mine[1]


def _bias(query: Tensor, first: int, last: int, mask: Tensor | None) -> Tensor:
    """The bias of the weights' logarithms: minus infinity for tokens that come later, or that a mask hides."""
    if mask is None:
        ahead = torch.arange(last, device=query.device) > torch.arange(first, last, device=query.device)[:, None]
        return query.new_zeros(ahead.shape).masked_fill_(ahead, -math.inf)
    mask = mask[..., :last]
    if mask.dim() == 3 and query.dim() == 4:  # which no kernel takes
        mask = mask[None]
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
    return query.new_empty((*query.shape[:-1], value.shape[-1])), sums


@_attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, past, mask, _, ctx.scale, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, past, mask, *output)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, past, mask, out, sums = ctx.saved_tensors
    found = _attend_backward(grad, query, key, value, past, mask, out, sums, ctx.scale)
    return *found, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_remember)

attend: torch._ops.OpOverload = torch.ops.sbpflow.attend.default
