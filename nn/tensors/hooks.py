"""Hooks on gradients: called once with the whole global gradient, not once a shard."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, simplefilter
from weakref import ref

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ...placement.errors import SbpError
from ...sbp import Layout
from .autograd import from_whole, laid
from .handle import AnyHandle, Handle
from .moves import flat, shards_as

__all__ = ["register_hook", "register_post_hook", "retain_grad", "retained"]


class Hooks:
    """Functions to be called with a tensor's gradient, as one global tensor; and with a leaf after it got one.

    They stay with the tensor whatever becomes of its `requires_grad`.
    """

    def __init__(self, kind: type[Handle]) -> None:
        self.kind = kind
        self.calls: OrderedDict[int, Callable[[Tensor], Tensor | None]] = OrderedDict()
        self.after: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        self.inner: tuple[Tensor, ...] | None = None  # the shards before they were handed on by _Pass
        self.passed: list[Tensor | None] = []  # what _Pass handed back to each of them

    def run(self, new: AnyHandle) -> AnyHandle:
        for call in list(self.calls.values()):
            other = call(new)
            if other is not None:
                if not isinstance(other, Handle):
                    other = type(new)._wrap(from_whole(new, other), flat(new._layout))
                new = laid(type(new), shards_as(other, new._layout, "hook"), new._layout)
        return new

    def run_on(self, shards: tuple[Tensor, ...], of: Layout) -> tuple[Tensor, ...]:
        """The same for a gradient's shards."""
        return self.run(laid(self.kind, shards, of))._shards


class _Pass(torch.autograd.Function):
    """Hands shards on; on the way back all their gradients are together, and hooks see one tensor."""

    @staticmethod
    def forward(ctx: Any, of: Layout, hooks: Hooks, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.of, ctx.hooks = of, hooks
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        back = ctx.hooks.run_on(grads, ctx.of.dual)
        ctx.hooks.passed[:] = back
        return None, None, *back


def _all_heard(passed: list[Tensor | None], at: int) -> Callable[[Tensor], None]:
    """Raises where a shard gets a gradient that did not come by _Pass, so that hooks have not seen it."""

    def check(g: Tensor) -> None:
        heard, passed[at] = passed[at], None
        if heard is None or not (g is heard or torch.allclose(g, heard, 0, 0, equal_nan=True)):
            raise SbpError(
                "a hook was put on a global tensor that had been used before, and did not see all of its gradient\n"
                "  call x.register_hook(...) right after x is made, before anything is computed with it"
            )

    return check


def _listen(shard: Tensor, call: Callable[[Tensor], Tensor | None]) -> None:
    """Have `call` called with a shard's gradient."""
    # Of a view whose base was written to, torch makes the node anew when asked for it, and a hook before crashes it.
    _ = shard.grad_fn
    shard.register_hook(call)  # type: ignore[no-untyped-call]


def _hooks_of(x: Handle) -> Hooks:
    if not x.requires_grad:
        raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
    if x._hooks is None:
        hooks, of = Hooks(type(x)), x._layout
        if x._leaf is None and len(x._shards) == 1:
            _listen(x._shards[0], lambda g: hooks.run_on((g,), of.dual)[0])
        elif x._leaf is None:  # only together are the shards' gradients one, so consumers from now on are heard
            hooks.inner, hooks.passed = x._shards, [None] * len(x._shards)
            for at, shard in enumerate(x._shards):
                if shard.requires_grad:
                    _listen(shard, _all_heard(hooks.passed, at))
            x._shards = _Pass.apply(of, hooks, *x._shards)  # type: ignore[no-untyped-call]
        x._hooks = hooks
    return x._hooks  # type: ignore[no-any-return]


def register_hook(x: Handle, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    calls = _hooks_of(x).calls
    if x._leaf is not None:
        x._leaf.watch(x)
    return _hung(calls, hook)


def register_post_hook(x: Handle, hook: Callable[[Tensor], None]) -> RemovableHandle:
    if x.requires_grad and x._leaf is None:
        raise RuntimeError("post accumulate grad hooks cannot be registered on non-leaf tensors")
    after = _hooks_of(x).after
    x._leaf.watch(x)
    return _hung(after, hook)


def _hung(table: dict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(table)
    table[handle.id] = hook
    return handle


def retained(x: AnyHandle) -> AnyHandle | None:
    """The gradient that backward passes have left on the shards of a tensor that is no leaf."""
    if any(shard.grad_fn is not node and not shard.retains_grad for shard, node, _ in x._heard):
        raise SbpError(
            f"a moved tensor {tuple(x.shape)} was written to after x.retain_grad(), and its gradient was not kept\n"
            "  call x.retain_grad() after the last write to it"
        )
    with catch_warnings():
        simplefilter("ignore")  # torch wonders whether one means it
        grads = [shard.grad for shard in x._behind]
    if all(g is None for g in grads):
        return None
    found = tuple(torch.zeros_like(s) if g is None else g for s, g in zip(x._shards, grads, strict=True))
    return laid(type(x), found, x._layout.dual)


def retain_grad(x: Handle) -> None:
    """Have backward passes leave gradients on the shards of a tensor that is no leaf."""
    if x._leaf is not None:
        return
    kept = [one for one in x._heard if one[0].grad_fn is one[1]]
    if len(kept) < len(x._heard):  # it was written to, and what is there is of what it was before, or of some shards
        for _, _, handle in x._heard:
            handle.remove()
        kept = []
        for shard in x._behind:
            shard.grad = None
    for shard in x._behind:
        node = shard.grad_fn
        if not shard.output_nr:
            shard.retain_grad()
        elif not any(shard is other for other, *_ in kept):
            # Of results of a function but the first, as moved shards are, torch refuses writes that come after its own.
            kept.append((shard, node, shard.register_hook(_leave_on(ref(shard)))))  # type: ignore[no-untyped-call]
    x._heard = tuple(kept)


def _leave_on(shard: "ref[Tensor]") -> Callable[[Tensor], None]:
    def leave(g: Tensor) -> None:
        x = shard()
        if x is not None:
            with catch_warnings():
                simplefilter("ignore")
                x.grad = g.clone() if x.grad is None else x.grad + g

    return leave
