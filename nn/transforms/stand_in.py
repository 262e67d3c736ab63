"""Stand-ins: tensors of the logical shape, wrapped by torch.func, that have a global tensor's calls made.

Transforms are C++ code above autograd, and ask no `__torch_function__`. A stand-in shows them shape, strides, dtype and
device; what comes out below all of them is a call of stand-ins, and is made of the global tensors as in eager code.
"""

from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...boxing.record import user_line
from ...placement.errors import SbpError
from ...sbp.call import map_tensors, tensors_in
from ..tensors.moves import describe
from ..tensors.tensor import GlobalTensor

__all__ = ["StandIn", "is_open", "lifted", "lowered"]

_KEYS = torch._C.DispatchKeySet
_AUTOCAST = [getattr(torch._C.DispatchKey, name) for name in dir(torch._C.DispatchKey) if name.startswith("Autocast")]
_AUTOGRAD = [torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView]


class StandIn(Tensor):
    """Stands for a global tensor inside of transforms. Its values and its gradients are those of that tensor."""

    value: GlobalTensor

    @staticmethod
    def __new__(cls, value: GlobalTensor) -> Self:
        of = value.layout_
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, of.shape, strides=of.strides, dtype=of.dtype, device=value.device
        )
        made.value = value
        return made

    def __init__(self, value: GlobalTensor) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A call that the program makes of one that forward-mode differentiation has, or that a level has left."""
        change = lifted if is_open() or forward_ad._current_level >= 0 else lowered
        args, kwargs = map_tensors((args, kwargs or {}), change)
        with torch._C.DisableTorchFunctionSubclass() if change is lifted else nullcontext():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")) == "meta":  # torch asks of which shape a product of zeros is
            args = map_tensors(args, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
            return func(*args, **kwargs)
        given = {id(x.value): x for x in tensors_in((args, kwargs)) if isinstance(x, StandIn)}
        _refuse_plain(func, args, kwargs)
        values, named = map_tensors((args, kwargs), lowered)
        with _above_autograd(), torch._C._EnableTorchFunction():
            out = _reshaped(func, *values, **named) if torch.Tag.inplace_view in func.tags else func(*values, **named)
        if torch.Tag.inplace_view in func.tags:
            with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        return map_tensors(out, lambda x: given[id(x)] if id(x) in given else lifted(x))


def is_open() -> bool:
    """Whether the program is inside of a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def lifted(x: Any) -> Any:
    """A global tensor as transforms take it; anything else as it is."""
    return StandIn(x) if isinstance(x, GlobalTensor) else x


def lowered(x: Any) -> Any:
    """The global tensor that a stand-in stands for."""
    return x.value if isinstance(x, StandIn) else x


def _above_autograd() -> Any:
    """Autograd, and all that sees calls, as they are outside of torch's dispatch: autocast alone is done."""
    off = torch._C._dispatch_tls_local_exclude_set()
    kept = [*_AUTOCAST, *(_AUTOGRAD if torch.is_inference_mode_enabled() else ())]
    excluded = _KEYS(torch._C.DispatchKey.Undefined)
    for key in kept:
        if off.has(key):
            excluded = excluded | _KEYS(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _reshaped(func: Any, x: GlobalTensor, *args: Any, **kwargs: Any) -> GlobalTensor:
    """Another shape in place, for which eager code would gather the tensor: its other shape in the same tensor."""
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    other = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)
    if other is None or (x.is_leaf and x.requires_grad):
        return func(x, *args, **kwargs)  # type: ignore[no-any-return]
    made = other(x, *args, **kwargs)
    x._shards, x._layout, x._moved = made._shards, made._layout, None
    return x


def _refuse_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to write a global tensor into a plain one, which would be a part of it on every rank."""
    if not func._schema.is_mutable:
        return
    for at, each in enumerate(func._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(each.name)
        if each.is_write and isinstance(value, Tensor) and not isinstance(value, StandIn):
            found = next(x.value for x in tensors_in((args, kwargs)) if isinstance(x, StandIn))
            raise SbpError(
                f"{func} would write a global tensor into a plain one inside of a transform of torch.func, at "
                f"{user_line()}\n  {describe(found)}\n"
                "  make what is written to of a global tensor: x.new_zeros(...), torch.zeros_like(x)"
            )
