"""The placement on which the tensors of one function meet, and to which plain tensors and numbers come."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...boxing.record import user_line
from ...placement.errors import PlacementError, SbpError
from .factories import check_values, whole_everywhere
from .moves import describe, flat, shards_as
from .tensor import GlobalTensor, wrap

__all__ = ["adopt", "looks", "meeting", "name_of"]


def meeting(func: Any, tensors: Sequence[GlobalTensor]) -> Any:
    """The placement on which tensors meet: their own; single numbers follow the others."""
    homes = [x for x in tensors if x._layout.shape] or tensors
    for x in homes[1:]:
        if x.placement is not homes[0].placement and x._layout.shape:
            raise PlacementError(
                f"{name_of(func)} of tensors on different placements\n"
                f"  {describe(homes[0])}\n  {describe(x)}\n"
                f"  move one first, as in x.to_global(placement=q) with q the other's placement: "
                f"{homes[0].placement} or {x.placement}"
            )
    return homes[0].placement


# Calls that look at other tensors' shapes or types, through which no gradient goes there.
_LOOKS = {"expand_as", "is_same_size", "reshape_as", "type_as", "view_as"}


def looks(func: Any, args: Sequence[Any]) -> bool:
    """Whether no more than the shape or the type of tensors behind the first is asked for."""
    return name_of(func) in _LOOKS and bool(args) and isinstance(args[0], GlobalTensor)


# Calls that take sizes, which a program may have computed: there a plain tensor of one whole number is a number.
_SIZED = {
    "as_strided", "expand", "narrow", "new_empty", "new_full", "new_ones", "new_zeros", "repeat", "reshape",
    "unflatten", "view",
}  # fmt: skip


def adopt(func: Any, t: Tensor, where: Any, *, only_looks: bool = False) -> GlobalTensor | int:
    """A tensor as one of this placement: a plain one counts as B, a single number comes over. A size is a number."""
    if isinstance(t, GlobalTensor):
        if t.placement is where:
            return t
        there = flat(t._layout, where)
        return wrap(shards_as(t, there, name_of(func), implicit=True), there)
    if not t.ndim and name_of(func) in _SIZED and not t.is_floating_point():
        return int(t)
    if only_looks:
        t = t.detach()
    if t.requires_grad and torch.is_grad_enabled():
        what, fix = "plain", "make it global too: flow.tensor(t, placement=x.placement, sbp=flow.B, requires_grad=True)"
        if isinstance(t, torch.nn.Parameter):
            what, fix = "a plain nn.Parameter", "make the whole model global: flow.nn.to_global(model, placement, sbp)"
        raise SbpError(
            f"{name_of(func)} of a global tensor and a plain one that requires grad, at {user_line()}\n"
            f"  {tuple(t.shape)}  {str(t.dtype).removeprefix('torch.')}  {what}; its gradient would stay local\n"
            f"  the global one is on {where}\n  {fix}"
        )
    check_values(t, name_of(func))
    return whole_everywhere(t, where)


def name_of(func: Any) -> str:
    """The name by which users call a function."""
    if isinstance(func, torch._ops.OpOverload):
        return str(func._schema.name).rpartition("::")[2]
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return str(name)
