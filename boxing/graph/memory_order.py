"""Memory orders: how the pieces of a value lie in memory where programs meet, known before anything runs.

An order names dims from the outermost in memory, without gaps; a dim that it leaves out repeats what it holds (stride
0). None is row by row.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...sbp.layout import dense_strides, memory_order

__all__ = ["MemoryOrder", "lay", "lies", "order_of", "strides_in"]

MemoryOrder: TypeAlias = tuple[int, ...] | None


def order_of(x: Tensor, *, repeats: bool) -> MemoryOrder:
    """The order of a tensor; with `repeats` dims that were expanded stay so.

    >>> mask = torch.empty(2, 3, 4).mT.expand(5, 2, 4, 3)
    >>> order_of(mask, repeats=True), order_of(mask[0], repeats=True), order_of(torch.empty(2, 3), repeats=True)
    ((1, 3, 2), (0, 2, 1), None)
    """
    if x.layout is not torch.strided or x.is_contiguous():
        return None
    places = list(zip(x.shape, x.stride(), strict=True))
    rest = [d for d, (n, step) in enumerate(places) if step or n == 1 or not repeats]
    if len(rest) == len(places):
        return memory_order(x) or None
    once = torch.empty_strided([x.shape[d] for d in rest], [x.stride(d) for d in rest], device="meta")
    return tuple(rest[at] for at in memory_order(once) or range(len(rest)))


def strides_in(shape: Sequence[int], order: MemoryOrder) -> tuple[int, ...]:
    """The strides of a tensor that lies in this order.

    >>> strides_in((5, 2, 4, 3), (1, 3, 2)), strides_in((2, 3), None)
    ((0, 12, 1, 4), (3, 1))
    """
    return (0,) * len(shape) if order == () else dense_strides(shape, order or ())


def lies(x: Tensor, order: MemoryOrder) -> bool:
    """Whether a tensor lies in this order already; the strides of dims of one element say nothing."""
    strides = strides_in(x.shape, order)
    return not x.numel() or all(n == 1 or s == t for n, s, t in zip(x.shape, x.stride(), strides, strict=True))


def lay(x: Tensor, order: MemoryOrder) -> Tensor:
    """A tensor of the same values in this order: itself where it lies so.

    >>> lay(torch.ones(2, 3, 4), (0, 2, 1)).stride()
    (12, 1, 3)
    """
    if lies(x, order):
        return x
    shape, kept = x.shape, range(x.ndim) if order is None else order
    repeated = [d for d in range(x.ndim) if d not in kept]
    for d in repeated:
        x = x.narrow(d, 0, 1)
    return x.permute(*repeated, *kept).contiguous().as_strided(shape, strides_in(shape, order))
