"""What an op costs where it runs: the roofline of a device, for FLOPs and bytes of forward and backward."""

from collections.abc import Callable, Sequence
from math import prod

import torch

from ...placement.cluster import Device
from ..call import Call
from .prices import Lie, local_numel

__all__ = ["LINEAR", "alone", "flops", "is_view", "rate", "seconds"]


def flops(call: Call) -> float:
    """Floating point operations of the forward of what has many for its size; 0 for all else."""
    count = _COUNTS.get(call.op._schema.name)
    return count(call) if count else 0.0


def _product(name: str, dim: int = -1) -> Callable[[Call], float]:
    return lambda call: float(2 * call.outputs[0].numel() * call.bound[name].shape[dim])


def _convolution(call: Call) -> float:
    weight = call.bound["weight"]
    return float(2 * call.outputs[0].numel() * prod(weight.shape[1:]))


def _attention(call: Call) -> float:
    query, key, value = (call.bound[name] for name in ("query", "key", "value"))
    return float(2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _slice(call: Call) -> float:
    """Of one that looks back, on average."""
    query, width = call.bound["query"], call.bound["value"].shape[-1]
    return float(prod(query.shape[:-1]) * call.bound["length"] * (query.shape[-1] + width))


def _recurrent(call: Call) -> float:
    """Every moment takes each weight once."""
    moments = prod(call.bound["x"].shape[:-1])
    return float(2 * moments * sum(w.numel() for w in call.bound["weights"] if w.dim() == 2))


_COUNTS: dict[str, Callable[[Call], float]] = {
    "aten::mm": _product("self"),
    "aten::addmm": _product("mat1"),
    "aten::bmm": _product("self"),
    "aten::baddbmm": _product("batch1"),
    "aten::matmul": _product("self"),
    "aten::linear": _product("input"),
    "aten::mv": _product("self"),
    "aten::scaled_dot_product_attention": _attention,
    "sbpflow::attend": _slice,
    "sbpflow::recurrent": _recurrent,
    **{f"aten::conv{n}d": _convolution for n in (1, 2, 3)},
    "aten::convolution": _convolution,
}

# Ops whose backward looks at none of their inputs' values.
LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "reshape", "_unsafe_view", "transpose", "permute", "t",
    "expand", "unsqueeze", "squeeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack",
    "to", "_to_copy", "clone", "contiguous", "detach", "alias", "flatten", "unflatten", "embedding",
})  # fmt: skip


def is_view(call: Call) -> bool:
    """Whether nothing is computed, since all that comes out lies in the memory of what went in."""
    held = {x.untyped_storage()._cdata for x in call.inputs}
    return bool(held) and all(y.untyped_storage()._cdata in held for y in call.outputs)


def rate(device: Device, dtype: torch.dtype) -> float:
    """FLOP/s of a device for a dtype; an unknown one counts as float32."""
    name = str(dtype).removeprefix("torch.")
    return device.flops.get(name) or device.flops["float32"]


def seconds(
    call: Call, inputs: Sequence[Lie], outputs: Sequence[Lie], share: int, device: Device, backward: bool
) -> float:
    """Of one rank, where the work is shared among so many; the backward of a product is two products."""

    moved = sum(
        local_numel(lie.state, tuple(x.shape), call.sizes) * x.dtype.itemsize
        for x, lie in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
    )
    return _roofline(call, moved, share, device, backward)


def alone(call: Call, device: Device, backward: bool) -> float:
    """Of one device that does all of it."""
    return _roofline(call, sum(x.nbytes for x in (*call.inputs, *call.outputs)), 1, device, backward)


def _roofline(call: Call, moved: int, share: int, device: Device, backward: bool) -> float:
    computed = flops(call) / share / rate(device, call.outputs[0].dtype) if call.outputs else 0.0
    return (3.0 if backward else 1.0) * max(computed, moved / device.memory_bandwidth)
