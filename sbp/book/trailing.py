"""Ops whose arguments say how many dims they work on, or which they leave alone: layer norms, paddings, renorm.

The rule is written for that number, as a line of the book would be.
"""

from functools import cache

from ..call import Call, Match
from ..registry import Rule, register
from ..rule import parse

__all__ = ["norm", "pad", "renorm"]

NORMS = {
    "layer_norm": "... {n}, {n}, {n} -> ... {n} ; hollow",
    "rms_norm": "... {n}, {n} -> ... {n} ; hollow",
    "native_layer_norm": "... {n}, {n}, {n} -> ... {n}, ... {one}, ... {one} ; hollow",
    "_fused_rms_norm": "... {n}, {n} -> ... {n}, ... {one} ; hollow",
}


@register(*NORMS)
def norm(call: Call) -> Match | None:
    """The dims that are normalised stay whole."""
    count = len(call.bound["normalized_shape"])
    text = NORMS[call.name].format(n=" ".join(f"n{i}!" for i in range(count)), one=" ".join("1" * count))
    return _rule(call.name, text)(call)  # type: ignore[return-value]


@register("_pad_circular")
def pad(call: Call) -> Match | None:
    """Dims that grow or shrink stay whole; a sum passes through, since nothing comes from outside."""
    amounts = list(call.bound["pad"])
    pairs = [amounts[i : i + 2] for i in range(0, len(amounts), 2)]  # of the last dim first
    dims = " ".join(f"d{i}!" if any(pair) else f"d{i}" for i, pair in reversed([*enumerate(pairs)]))
    return _rule(call.name, f"... {dims} -> ... {dims} ; lin(0) hollow")(call)  # type: ignore[return-value]


@register("renorm")
def renorm(call: Call) -> Match | None:
    """Only the dim along which slices are taken may be split."""
    ndim = call.inputs[0].dim()
    dims = " ".join("d" if d == call.bound["dim"] % ndim else f"x{d}!" for d in range(ndim))
    return _rule(call.name, f"{dims} -> {dims} ; hollow")(call)  # type: ignore[return-value]


@cache
def _rule(name: str, text: str) -> Rule:
    return parse(name, text)
