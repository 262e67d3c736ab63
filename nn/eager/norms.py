"""Norms of many tensors at once, as gradients are clipped by: each rank's part of all of them moves together.

rank 0   |a0|^2  |b0|^2  |c|^2        a, b split, c whole on every rank: it counts on the first
rank 1   |a1|^2  |b1|^2    0          one reduction of three numbers, whatever the number of ranks
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...boxing.exchange.execute import token
from ...placement import Placement
from ...placement.world import owned
from ...sbp import Layout
from ...sbp.state import State
from ..tensors.moves import shards_as
from ..tensors.tensor import GlobalTensor, wrap

__all__ = ["norms"]


def norms(xs: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The norm of each, outside of autograd; what cannot be taken together is taken one by one."""
    found: list[Tensor | None] = [None] * len(xs)
    groups: dict[tuple[Placement, torch.dtype], list[int]] = {}
    for at, x in enumerate(xs):
        if _adds_up(x, ord):
            groups.setdefault((x.placement, x.dtype), []).append(at)
        else:
            found[at] = torch.linalg.vector_norm(x, ord, dtype=dtype)
    for (where, _), members in groups.items():
        for at, norm in zip(members, _together([xs[at] for at in members], where, ord, dtype).unbind(0), strict=True):
            found[at] = norm
    return found  # type: ignore[return-value]


def _adds_up(x: Any, ord: float) -> bool:
    if not isinstance(x, GlobalTensor) or x._layout.state.partial or not x.numel():
        return False
    return ord > 0 and not (x.requires_grad and torch.is_grad_enabled())


def _together(xs: Sequence[GlobalTensor], where: Placement, ord: float, dtype: torch.dtype | None) -> GlobalTensor:
    split = [{a for a in x._layout.state.split if where.shape[a] > 1} for x in xs]
    axes = tuple(sorted(set().union(*split)))
    narrow = xs[0].dtype.itemsize < 4 and dtype is None  # powers of half precision would be infinite
    terms = [
        _terms([x._shards[i] for x in xs], split, axes, where.coords(rank), ord, torch.float32 if narrow else dtype)
        for i, rank in enumerate(owned(where))
    ]
    made = dtype.to_real() if dtype else xs[0].dtype.to_real()
    kind = torch.float32 if narrow else made
    of = Layout(where, State(((),), axes, "max" if ord == math.inf and axes else "sum"), (len(xs),), kind)
    sums = wrap(tuple(terms) or (token(of),), of)
    whole = Layout(where, State(((),)), of.shape, kind)
    held = shards_as(sums, whole, "norm", implicit=True)
    roots = held if ord == math.inf else tuple(s ** (1 / ord) for s in held)
    return wrap(tuple(s.to(made) for s in roots), Layout(where, whole.state, of.shape, made))


def _terms(
    shards: list[Tensor],
    split: Sequence[set[int]],
    axes: tuple[int, ...],
    coords: Sequence[int],
    ord: float,
    dtype: torch.dtype | None,
) -> Tensor:
    """A rank's part of each norm; of what several ranks hold alike, the first rank counts it."""
    if ord == math.inf:  # of nothing torch knows no maximum
        shards = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
    local = torch._foreach_norm(shards, ord, dtype)
    mine = [not any(coords[a] for a in axes if a not in over) for over in split]
    if ord == math.inf:
        return torch.stack(local)
    return torch.stack(
        [norm**ord if counts else torch.zeros_like(norm) for norm, counts in zip(local, mine, strict=True)]
    )
