"""The seconds of an op where it runs, forward and backward, by what its device reaches.

    product      2mnk / (share x peak)  +  bytes / (share x bandwidth)  +  launches
    attention    the same with the share of fused attention
    others       bytes / (share x bandwidth)  +  launches  +  exponentials and the like
    host         its seconds of each launch: beside all of these, so that the longer counts of what a task adds up

One exponential of each element takes as long as a GELU's was seen to lengthen it, beside reading and writing its
elements. Of a datasheet, whose shares are 1 and whose launches take no time, the longer of computing and reading counts
alone: that is the bound which it promises.
"""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import torch

from ...placement.hardware import Device
from ..call import Call
from ..kernels.fused import FusedOp
from ..kernels.kernels import EIGHT_BITS, Kernels, OpPass, is_view, kernels_of
from ..state import Lie, local_numel
from .options import Option

__all__ = [
    "NOTHING",
    "OpSeconds",
    "OptionSeconds",
    "adding_seconds",
    "alone",
    "bandwidth",
    "bytes_of",
    "dtype_of",
    "on_rank",
    "option_seconds",
    "rate",
    "seconds",
]


class OpSeconds(NamedTuple):
    """Seconds of a rank in the forward, and in the backward."""

    forward: float
    backward: float


NOTHING = OpSeconds(0.0, 0.0)


class OptionSeconds(NamedTuple):
    """Seconds of each option of an op, the part of the backward, and those of the host, whatever the option."""

    whole: list[float]
    back: list[float]
    host: OpSeconds


def rate(device: Device, dtype: torch.dtype, attention: bool = False) -> float:
    """FLOP/s that a device reaches for a dtype; an unknown one counts as float32."""
    name = str(dtype).removeprefix("torch.")
    peak, fitted = device.flops.get(name) or device.flops["float32"], device.fitted
    if fitted is None:
        return peak
    return peak * (fitted.attention if attention and fitted.attention is not None else fitted.product)


def bandwidth(device: Device) -> float:
    """Bytes per second that a device reaches to and from its memory."""
    return device.memory_bandwidth * (device.fitted.memory if device.fitted else 1.0)


def on_rank(call: Call, inputs: Sequence[Lie], outputs: Sequence[Lie]) -> list[int]:
    """The bytes of each tensor on the fullest rank."""
    return [
        local_numel(lie.state.dims, tuple(x.shape), call.sizes) * x.dtype.itemsize
        for x, lie in zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
    ]


def seconds(kernels: Kernels, held: Sequence[float], share: float, dtype: torch.dtype, device: Device) -> OpSeconds:
    """The seconds of one rank that holds so many bytes of each tensor, where so many share the FLOPs."""
    pace = share * rate(device, dtype, kernels.attention)
    ways = (_spent(way, held, pace, device) for way in kernels[:2])
    return OpSeconds(*ways)


def option_seconds(
    call: Call,
    options: Sequence[Option],
    wants: Sequence[bool],
    device: Device,
    *,
    fused: FusedOp | None,
    again: bool,
) -> OptionSeconds:
    """The seconds of each option. The backward may have the forward once `again`."""
    if is_view(call):
        return OptionSeconds([0.0] * len(options), [0.0] * len(options), NOTHING)
    kernels, dtype = kernels_of(call, wants), dtype_of(call)
    kernels = fused.of(kernels) if fused else kernels
    held = (on_rank(call, option.inputs, option.outputs) for option in options)
    both = [seconds(kernels, of, option.share, dtype, device) for of, option in zip(held, options, strict=True)]
    back = [of.backward + again * of.forward for of in both]
    whole = [of.forward + more for of, more in zip(both, back, strict=True)]
    spent = device.fitted.host if device.fitted else 0.0
    forward, backward = (spent * way.launches for way in kernels[:2])
    return OptionSeconds(whole, back, OpSeconds(forward, backward + again * forward))


def adding_seconds(size: int, device: Device) -> float:
    """Seconds in which so many bytes are added to a sum, in place; counted where somebody has timed such kernels."""
    fitted = device.fitted
    if fitted is None or fitted.update is None:
        return 0.0
    return fitted.update * 3 * size / bandwidth(device) + fitted.launch


def alone(call: Call, device: Device) -> float:
    """The seconds of the forward on one device that does all of it."""
    return seconds(kernels_of(call), bytes_of(call), 1, dtype_of(call), device).forward


def bytes_of(call: Call) -> list[int]:
    """The bytes of each tensor."""
    return [x.nbytes for x in (*call.inputs, *call.outputs)]


def dtype_of(call: Call) -> torch.dtype:
    """The dtype in which products are computed: that of what is multiplied, whatever the sums are kept in."""
    if call.op._schema.name == EIGHT_BITS:
        return torch.float8_e4m3fn
    return next((x.dtype for x in (*call.inputs, *call.outputs) if x.is_floating_point()), torch.float32)


def _spent(way: OpPass, held: Sequence[float], pace: float, device: Device) -> float:
    computing: float = way.flops / pace
    moving: float = sum(map(mul, way.traffic, held)) / bandwidth(device)
    fitted = device.fitted
    if fitted is None:
        return max(computing, moving)
    if way.evaluations:
        moving += way.evaluations * (fitted.functions - 1) * 2 * max(held) / bandwidth(device)
    return computing + moving + way.launches * fitted.launch
