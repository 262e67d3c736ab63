"""Ops whose arguments say how many dims they work on, or which they leave alone: layer norms, renorm.

The rule is written for that number, as a line of the book would be.
"""

from functools import cache

from ..call import Call, Match
from ..rule import Rule, parse, register

__all__ = ["norm", "renorm"]

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


@register("renorm")
def renorm(call: Call) -> Match | None:
    """Only the dim along which slices are taken may be split."""
    ndim = call.inputs[0].dim()
    dims = " ".join("d" if d == call.bound["dim"] % ndim else f"x{d}!" for d in range(ndim))
    return _rule(call.name, f"{dims} -> {dims} ; hollow")(call)  # type: ignore[return-value]


@cache
def _rule(name: str, text: str) -> Rule:
    return parse(name, text)
