"""Hooks on gradients: called once with the whole global gradient, not once a shard."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..sbp import Layout
from .autograd import from_whole
from .moving import flat, shards_as
from .tensor import GlobalTensor, wrap

__all__ = ["register_hook", "register_post_hook", "retain_grad"]


class Hooks:
    """What is to be called with a tensor's gradient, as one global tensor."""

    def __init__(self) -> None:
        self.calls: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.retain = False

    def run(self, new: GlobalTensor) -> GlobalTensor:
        for call in list(self.calls.values()):
            other = call(new)
            if other is not None:
                if not isinstance(other, GlobalTensor):
                    other = wrap(from_whole(new, other), flat(new._layout))
                new = wrap(shards_as(other, new._layout, "hook"), new._layout)
        return new


class _Pass(torch.autograd.Function):
    """Hands shards on; on the way back all their gradients are together, and hooks see one tensor."""

    @staticmethod
    def forward(ctx: Any, of: Layout, hooks: Hooks, keep: list[Any], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.hooks, ctx.keep = of, hooks, keep
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        new = ctx.hooks.run(wrap(grads, ctx.of.dual))
        if ctx.hooks.retain and ctx.keep[0]() is not None:
            x = ctx.keep[0]()
            x._grad = new if x._grad is None else x._grad + new
        return None, None, None, *new._shards


def _hooks_of(x: GlobalTensor) -> Hooks:
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if x._hooks is None:
        x._hooks = Hooks()
        if x._leaf is None:
            x._shards = _Pass.apply(x._layout, x._hooks, [ref(x)], *x._shards)  # type: ignore[no-untyped-call]
    return x._hooks  # type: ignore[no-any-return]


def register_hook(x: GlobalTensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    calls = _hooks_of(x).calls
    if x._leaf is not None:
        x._leaf.watch(x)
    handle = RemovableHandle(calls)
    calls[handle.id] = hook
    return handle


def register_post_hook(x: GlobalTensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    if x._leaf is None:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    x._leaf.watch(x)
    handle = RemovableHandle(x._leaf.post_hooks)
    x._leaf.post_hooks[handle.id] = hook
    return handle


def retain_grad(x: GlobalTensor) -> None:
    if x._leaf is None:
        _hooks_of(x).retain = True
