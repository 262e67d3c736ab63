"""What torch tags as pointwise, and casts: every element of the result comes from the elements at its place."""

from dataclasses import replace

import torch

from ..call import Call, Match
from ..pattern import Dim, Operand, lay
from ..registry import register

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
    """A sum passes through, unless its terms were rounded to integers or cut to booleans."""
    match = pointwise(call)
    source, target = call.inputs[0].dtype, call.outputs[0].dtype
    exact = source != torch.bool and (source == target or target.is_floating_point or target.is_complex)
    return replace(match, linear=((0,),)) if match and exact else match
