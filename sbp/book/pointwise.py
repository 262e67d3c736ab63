"""Pointwise ops, as torch tags them, and casts: every element of the result comes from the elements at its place."""

from dataclasses import replace

import torch

from ..call import Call, Match
from ..pattern import Dim, Operand, lay
from ..rule import register

__all__ = ["cast", "pointwise"]

EACH = Operand((Dim("*"),))


@register("pointwise")
def pointwise(call: Call) -> Match | None:
    """All inputs broadcast against each other; every dim may be split."""
    inputs = [(EACH, tensor.shape) for tensor in call.inputs]
    match = lay(inputs, [(EACH, tensor.shape) for tensor in call.outputs], call.bound)
    return match and replace(match, hollow=True)


@register("_to_copy", "to.dtype", "to.dtype_layout", "to.device")
def cast(call: Call) -> Match | None:
    """A sum passes through where its terms lose no bits: see `precision`, which looks at every linear op."""
    match = pointwise(call)
    return replace(match, linear=((0,),)) if match and call.inputs[0].dtype != torch.bool else match
