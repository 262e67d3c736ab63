"""Runtime support for generated code: initial gradients, packed gradient buckets, the backward of max and min."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ....boxing import Pending, box, box_async
from ....boxing.exchange.execute import token
from ....boxing.graph.buckets import packed
from ....placement.world import device, owned
from ....sbp import Layout, State
from ..lower.registers import Transfer

__all__ = [
    "Bucket", "Flying", "Shards", "SumOfParts", "hold", "no_shards", "ones", "own", "plain", "to_holders", "trimmed",
]  # fmt: skip

Shards: TypeAlias = tuple[Tensor, ...]


def no_shards(layout: Layout) -> Shards:
    known: Shards = layout.memo.setdefault("graph.token", (token(layout),))
    return known


def plain() -> Any:
    """A context without autocast: the graph holds its casts."""
    if torch._C._is_any_autocast_enabled():
        return torch._C._DisableAutocast()
    return nullcontext()


def ones(layout: Layout) -> Shards:
    """The shards of a one: whole, or as addends of which only the first is not zero."""
    where = layout.placement
    plain = Layout(where, State(((),) * len(layout.shape)), layout.shape, layout.dtype)
    whole = tuple(torch.ones(layout.shape, dtype=layout.dtype, device=device(where, r)) for r in owned(where))
    with torch.no_grad():
        return box(whole or no_shards(layout), plain, layout, op="seed")


def own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class SumOfParts:
    """Parts of gradients added to their sums, in place. `slots` has for each part the name of its sum, and by shard
    whether nobody else has its memory."""

    def __init__(self, slots: Sequence[tuple[str, tuple[bool, ...]]]) -> None:
        self.slots = slots

    def __call__(self, sums: dict[str, list[Tensor]], tensors: Sequence[Tensor]) -> None:
        at = 0
        totals: list[Tensor] = []
        parts: list[Tensor] = []
        for slot, owns in self.slots:
            mine = tensors[at : at + len(owns)]
            at += len(owns)
            if slot in sums:
                totals += sums[slot]
                parts += mine
            else:
                sums[slot] = [x if is_own else x.clone() for x, is_own in zip(mine, owns, strict=True)]
        if parts:
            torch._foreach_add_(totals, parts)


def trimmed(shards: Shards) -> Shards:
    """Results in no more memory than they need.

    On CPU torch leaves a mean loss in the memory of all the numbers that it is the mean of: mse_loss, smooth_l1_loss,
    binary_cross_entropy and soft_margin_loss do."""
    if any(_loose(x) for x in shards):
        return tuple(own(x) if _loose(x) else x for x in shards)
    return shards


def _loose(x: Tensor) -> bool:
    return x.ndim == 0 and not x._is_view() and x.untyped_storage().nbytes() > x.itemsize


def hold(shards: Shards, src: Layout, dst: Layout) -> tuple[Shards, tuple[Shards, Shards]]:
    """A move of a maximum, with what it takes to bring the gradient back to who held it."""
    with torch.enable_grad():
        leaves = tuple(x.detach().requires_grad_() for x in shards)
        out = box(leaves, src, dst)
    return tuple(y.detach() for y in out), (leaves, out)


def to_holders(saved: tuple[Shards, Shards], grads: Shards) -> Shards:
    leaves, out = saved
    return torch.autograd.grad(out, leaves, grads)


class Bucket:
    """The gradients of one bucket on their way, or weights that are gathered together, as one tensor.

    Its memory is kept from step to step, because new memory of this size costs the system as much time as the copy into
    it."""

    def __init__(self, transfer: Transfer) -> None:
        self.packed = packed(transfer.pairs)
        self.memory: list[Tensor | None] = []
        # Gathered weights come in pieces of each rank.
        whole = not transfer.pairs[0][0].state.partial
        self.shapes = [dst.local_shape(dst.placement.flat[0]) for _, dst in transfer.pairs] if whole else None

    def now(self, *members: Shards) -> list[Shards]:
        return self._out(box(self._in(members), self.packed.src, self.packed.dst, op="bucket"))

    def start(self, *members: Shards) -> "Flying":
        return Flying(self, box_async(self._in(members), self.packed.src, self.packed.dst))

    def _in(self, members: Sequence[Shards]) -> list[Tensor]:
        ranks = list(zip(*members, strict=True))
        self.memory = self.memory or [None] * len(ranks)
        packed = [self.packed.pack(parts, held) for parts, held in zip(ranks, self.memory, strict=True)]
        self.memory = list(packed)
        return packed

    def _out(self, shards: Shards) -> list[Shards]:
        parts = list(zip(*map(self.packed.unpack, shards), strict=True))
        if self.shapes is None:
            return parts
        return [tuple(x.reshape(shape) for x in of) for of, shape in zip(parts, self.shapes, strict=True)]


class Flying:
    """A bucket under way."""

    def __init__(self, bucket: Bucket, pending: Pending) -> None:
        self.bucket, self.pending = bucket, pending

    def wait(self) -> list[Shards]:
        return self.bucket._out(self.pending.wait())
