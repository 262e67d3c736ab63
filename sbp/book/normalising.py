"""Batch norm: with given statistics every dim splits; statistics of the batch need all samples of a channel."""

from collections.abc import Hashable

from ..call import Call, Match
from ..rule import register
from .labels import labelled, named, position

__all__: list[str] = []


@register("batch_norm")
def batch_norm(call: Call) -> Match:
    """Running statistics are changed in place, by each rank for its own channels."""
    x, training = call.bound["input"], call.bound["training"]
    given = [name for name in ("weight", "bias", "running_mean", "running_var") if call.bound[name] is not None]
    dims: list[Hashable] = [None if training and d != 1 else d for d in range(x.dim())]
    linear = []
    if not training:
        shift = [name for name in ("input", "running_mean", "bias") if name == "input" or name in given]
        linear = [[position(call, name) for name in shift]]
    scale = [position(call, name) for name in ("weight", "bias") if name in given]
    if "weight" in given:
        linear.append(scale)
    labels = named(call, input=dims, weight=[1], bias=[1], running_mean=[1], running_var=[1])
    return labelled(call, labels, [dims], linear=linear)
