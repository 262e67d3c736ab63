"""Loss scale: the factor that keeps gradients of fp16 in the range of its numbers, and the steps that are left out.

    loss * scale  ->  gradients * scale  ->  finite on all ranks?  yes   gradients / scale, the optimizers step
                                                                    no    nobody steps, and the scale halves

It doubles when so many steps in a row were good. All ranks are told of an overflow on one of them.
"""

from collections.abc import Iterable, Sequence
from math import inf
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from ....boxing import box
from ....placement import Placement
from ....placement.errors import SbpError
from ....placement.world import device, owned
from ....sbp import Layout, State

__all__ = ["FIRST", "PATIENCE", "LossScale", "go_on", "overflowed", "scale_of", "steps_by", "unscaled"]

FIRST = 2.0**16
PATIENCE = 2000  # good steps before it doubles


class LossScale:
    """The scale of a graph's losses, the same on all ranks. It stays what it is given, or finds what works.

    >>> scale = LossScale()
    >>> scale.after(overflow=True)
    >>> scale.value
    32768.0
    """

    def __init__(self, given: float | None = None) -> None:
        self.fixed = given is not None
        self.value = FIRST if given is None else float(given)
        self.good = 0  # steps since it changed or overflowed

    def go_on(self, value: float, good: int) -> None:
        """Be where another was, unless it is to stay what it was given."""
        if not self.fixed:
            self.value, self.good = value, good

    def tensor(self) -> Tensor:
        """The factor of the losses of the step that is about to run."""
        return torch.tensor(self.value, device="cpu")

    def after(self, *, overflow: bool) -> None:
        """Learn how a step went, for the next one."""
        self.good = 0 if overflow else self.good + 1
        if self.fixed:
            return
        if overflow:
            self.value /= 2
            if self.value < torch.finfo(torch.float32).tiny:
                raise SbpError(
                    "the loss scale of fp16 has halved until nothing was left: gradients are not finite at any scale\n"
                    "  look for an infinity or a division by zero in the loss, or take bf16, which needs no scale"
                )
        elif self.good >= PATIENCE:
            self.value, self.good = self.value * 2, 0


_scales: "WeakKeyDictionary[Optimizer, LossScale]" = WeakKeyDictionary()  # of the graphs that optimizers step in
_waiting: "WeakKeyDictionary[Optimizer, tuple[float, int]]" = WeakKeyDictionary()  # for a graph that is to come


def scale_of(optimizer: Optimizer) -> LossScale | None:
    """The scale of the losses whose gradients an optimizer steps by."""
    return _scales.get(optimizer)


def steps_by(optimizer: Optimizer, scale: LossScale) -> None:
    """Have an optimizer step in a graph with this scale, which goes on where one was loaded."""
    if _scales.get(optimizer) is not scale:
        _scales[optimizer] = scale
        if optimizer in _waiting:
            scale.go_on(*_waiting.pop(optimizer))


def go_on(optimizer: Optimizer, value: float, good: int) -> None:
    """Have the scale of an optimizer's graph, now or when it comes, be where another was."""
    scale = _scales.get(optimizer)
    if scale is None:
        _waiting[optimizer] = value, good
    else:
        scale.go_on(value, good)


def overflowed(grads: Iterable[tuple[Placement, Sequence[Tensor]]], ranks: Placement) -> bool:
    """Whether a number in some gradient is not finite on some rank; all `ranks`, in a line, are told the same.

    Each gradient comes as the shards that this process owns, in the order of its placement.
    """
    here = owned(ranks)
    held: dict[int, list[Tensor]] = {rank: [] for rank in here}
    for where, shards in grads:
        for rank, shard in zip(owned(where), shards, strict=False):
            held[rank].append(shard)
    flags = [_flag(held[rank], device(ranks, rank)) for rank in here]
    if not here or ranks.size == 1:
        return any(bool(flag) for flag in flags)
    addends = Layout(ranks, State((), (0,)), (), torch.float32)
    told = box(flags, addends, Layout(ranks, State(()), (), torch.float32), op="overflow")
    return bool(told[0])


def _flag(grads: Sequence[Tensor], where: torch.device) -> Tensor:
    """One where a number is not finite, else zero."""
    found = [x for x in grads if x.numel()]
    if not found:
        return torch.zeros((), device=where)
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(found, inf)])
    return (~largest.isfinite()).any().float()


def unscaled(grads: Sequence[tuple[Tensor, ...]], scale: float) -> list[tuple[Tensor, ...]]:
    """Gradients without the scale: in their own memory, or they would be there twice; but for those that share it."""
    ends: dict[int, list[tuple[int, int, int]]] = {}  # the ends of shards, by storage
    shards = [x for of in grads for x in of]
    for at, x in enumerate(shards):
        reach = sum((int(n) - 1) * int(step) for n, step in zip(x.shape, x.stride(), strict=True))
        first = int(x.storage_offset()) * x.itemsize
        last = first + (reach + 1) * x.itemsize
        ends.setdefault(x.untyped_storage()._cdata, []).append((first, last, at))
    alone = set[int]()
    for spans in ends.values():
        spans.sort()
        reached = 0
        for (first, last, at), after in zip(spans, [*spans[1:], None], strict=True):
            dense = last - first == shards[at].nbytes
            if dense and first >= reached and (after is None or last <= after[0]):
                alone.add(at)
            reached = max(reached, last)
    plain = iter([x.div_(scale) if at in alone else x / scale for at, x in enumerate(shards)])
    return [tuple(next(plain) for _ in of) for of in grads]
