"""Replacement of a module's parameter by a global one: what hangs on the old one comes along.

These are the user's attributes, the gradient, and hooks. Hooks stay in the tables that torch made for them, so that the
handles that users hold still remove them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ...boxing.box import dense
from ...placement.errors import SbpError
from ..tensors.autograd import gradient_layout
from ..tensors.factories import whole_everywhere
from ..tensors.handle import attributes
from ..tensors.hooks import Hooks
from ..tensors.moves import own_shards
from ..tensors.tensor import GlobalTensor, wrap

__all__ = ["BEFORE_GLOBAL", "check_replaceable", "has_hooks", "replace"]

BEFORE_GLOBAL: list[Callable[[], None]] = []  # what else has to be known, such as to who saves a model's parameters
_KINDS = (Tensor, nn.Parameter, GlobalTensor, FakeTensor)


def check_replaceable(name: str, old: Tensor, asked: str) -> None:
    """Refuse what would be lost: a class of its own, and a graph."""
    if type(old) not in _KINDS:
        raise SbpError(
            f"{asked}: {name} is a {type(old).__name__}, and a global tensor in its place would not be\n"
            f"  put a plain parameter there first: module.{name} = torch.nn.Parameter(plain tensor)"
        )
    if not old.is_leaf:
        raise SbpError(
            f"{asked}: {name} {tuple(old.shape)} was computed from something that requires grad, which would be lost\n"
            f"  put a leaf there, as by .detach(), or compute it in forward from global parameters"
        )


def replace(old: Tensor, new: GlobalTensor) -> GlobalTensor:
    """Put `new`, which has the same values, in the place of `old`, with all that hangs on this."""
    for call in BEFORE_GLOBAL:
        call()
    if not isinstance(old, FakeTensor):
        vars(new).update(attributes(old))
    if isinstance(old, nn.Parameter):
        new._is_param = True
    if has_hooks(old):
        new._hooks = _hooks(old)
    new.requires_grad_(old.requires_grad)
    if old.grad is not None and not old.grad.is_meta:
        with torch.no_grad():
            there, held = gradient_layout(new._layout), old.grad
            grad = held if isinstance(held, GlobalTensor) else whole_everywhere(dense(held), new.placement)
            new.grad = wrap(own_shards(grad, there, "gradient"), there)
    return new


def has_hooks(value: Tensor) -> bool:
    """Whether somebody is to be called with its gradient."""
    hooks = _hooks(value)
    return bool(hooks.calls or hooks.after)


def _hooks(old: Tensor) -> Hooks:
    made = Hooks(GlobalTensor)
    if isinstance(old, GlobalTensor):
        return old._hooks or made
    calls: Any = old._backward_hooks
    after: Any = old._post_accumulate_grad_hooks
    made.calls, made.after = calls or made.calls, after or made.after
    return made
