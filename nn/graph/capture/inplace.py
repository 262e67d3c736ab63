"""Writes in place, turned into ops that make the new value; a view's new value goes back to its place.

x.relu_()             relu(x)
x[2] = v              select_scatter(x, v, 0, 2)
x.t().add_(1)         permute(add(permute(x), 1))
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ....sbp.call import Ref
from ....sbp.traits import traits

__all__ = ["RESHAPES", "Geometry", "Op", "back", "functional", "geometry", "overload_like", "storage_of", "written"]

aten = torch.ops.aten
Op = torch._ops.OpOverload

# Those that change what a tensor is a view of, not what it holds: op -> the view op.
RESHAPES: dict[str, str] = {
    "t_": "t", "transpose_": "transpose", "swapaxes_": "swapaxes", "swapdims_": "swapdims", "squeeze_": "squeeze",
    "unsqueeze_": "unsqueeze", "as_strided_": "as_strided", "detach_": "detach",
}  # fmt: skip

# Where the functional op does not have the name without the last underscore.
OTHER = {
    "__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift", "__irshift__": "bitwise_right_shift", "normal_": "normal_functional",
}  # fmt: skip

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes to, in the order of its schema."""
    found = []
    for at, parameter in enumerate(op._schema.arguments):
        info = parameter.alias_info
        if info is not None and info.is_write:
            value = args[at] if at < len(args) else kwargs.get(parameter.name)
            found.append(value)
    return found


@cache
def functional(op: Op) -> tuple[Op, frozenset[str]] | None:
    """The op that makes what this one writes, and which arguments it does not take (`out`)."""
    schema = op._schema
    outs = frozenset(a.name for a in schema.arguments if a.is_out)
    namespace, _, name = schema.name.partition("::")
    if not outs:
        name = OTHER.get(name) or (name[:-1] if name.endswith("_") and not name.endswith("__") else name)
    found = _alike(getattr(getattr(torch.ops, namespace), name, None), op, outs)
    return None if found is None else (found, outs)


def overload_like(op: Op, name: str) -> Op:
    """The overload of an ATen op that takes what this one does."""
    found = _alike(getattr(aten, name), op, frozenset())
    assert found is not None, (op, name)
    return found


def _alike(packet: Any, op: Op, outs: frozenset[str]) -> Op | None:
    if packet is None:
        return None
    wanted = _arguments(op._schema, outs)
    order = sorted(packet.overloads(), key=lambda overload: bool(overload != op._overloadname))
    for overload in order:
        other: Op = getattr(packet, overload)
        said = _arguments(other._schema, frozenset())
        if not other._schema.is_mutable and (
            said == wanted or (said[: len(wanted)] == wanted and _optional(other, len(wanted)))
        ):
            return other
    return None


def _arguments(schema: Any, outs: frozenset[str]) -> list[tuple[str, str]]:
    """Names and types; the first has no name, because it is `self` in one op and `input` in another."""
    return [(a.name if at else "", str(a.type)) for at, a in enumerate(schema.arguments) if a.name not in outs]


def _optional(op: Op, start: int) -> bool:
    return all(a.has_default_value() for a in op._schema.arguments[start:])


@dataclass(frozen=True)
class Geometry:
    """The place of a tensor in its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: tuple[Any, ...]  # its dtype, and whether it is read conjugated or negated


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory that a tensor lies in."""
    found: int = tensor.untyped_storage()._cdata
    return found


def geometry(x: Tensor) -> Geometry:
    return Geometry(tuple(x.shape), x.stride(), int(x.storage_offset()), (x.dtype, x.is_conj(), x.is_neg()))


# (the tensor that was viewed, the view's new value) -> what ops make its new value of both
Back = Callable[[Callable[..., int], int, int], int]


def back(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], at: int, whole: Geometry, part: Geometry
) -> Back | None:
    """The way of a view's new value back into its base, whose `at`-th view by this op it is; or None.

    It is told as a function of `make(op, *args)`, the number of the viewed tensor and that of the new value.
    """
    name = op._schema.name.partition("::")[2]
    said = traits(name)
    if part.bits != whole.bits or 0 in [s for s, n in zip(part.stride, part.shape, strict=True) if n > 1]:
        return None
    if said & {"same", "reshaped", "spread"} and prod(part.shape) == prod(whole.shape):
        return lambda make, _, new: (
            new if part.shape == whole.shape else make(aten.reshape.default, Ref(new), [*whole.shape])
        )
    if "permuted" in said:
        order = _order(op, args, kwargs, len(whole.shape))
        inverse = [order.index(d) for d in range(len(order))]
        return lambda make, _, new: make(aten.permute.default, Ref(new), inverse)
    if "cut" in said and len(part.shape) == len(whole.shape):
        return _into_range(whole, part)
    if name in ("select", "unbind"):
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(whole.shape)
        index = at
        if name == "select":
            index = (args[2] if len(args) > 2 else kwargs["index"]) % whole.shape[dim]
        return lambda make, old, new: make(aten.select_scatter.default, Ref(old), Ref(new), dim, index)
    if name == "diagonal":
        rest = [*args[1:]]
        return lambda make, old, new: make(aten.diagonal_scatter.default, Ref(old), Ref(new), *rest, **kwargs)
    return None


def _into_range(whole: Geometry, part: Geometry) -> Back | None:
    dims = [
        d
        for d in range(len(whole.shape))
        if part.shape[d] != whole.shape[d] or (part.stride[d] != whole.stride[d] and part.shape[d] > 1)
    ]
    if len(dims) != 1:
        return None
    (dim,) = dims
    stride, length = whole.stride[dim], part.shape[dim]
    if not stride or not length:
        return None
    start = (part.offset - whole.offset) // stride
    step = part.stride[dim] // stride if length > 1 else 1
    end = start + (length - 1) * step + 1
    return lambda make, old, new: make(aten.slice_scatter.default, Ref(old), Ref(new), dim, start, end, step)


def _order(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dims: int) -> list[int]:
    """The dim of its input that each dim of a permuting op's output is: seen on a tensor whose sizes all differ."""
    probe = torch.empty(_PRIMES[:dims], device="meta")
    shape = op(probe, *args[1:], **kwargs).shape
    return [_PRIMES.index(n) for n in shape]
