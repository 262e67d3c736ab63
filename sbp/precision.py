"""Precision: which dtypes hold every number of another, so that addends may be turned into them and added up later.

1000.3 - 1000.0 = 0.3 in float32;  in bfloat16 its addends are 1000 and -1000, and their sum is 0

It is the same on the way back: what makes a value wider makes its gradient narrower.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from .call import Call
from .traits import traits

__all__ = ["adds_up", "exact_groups", "holds", "promotes", "rounded"]

LINEAR = ("aten::", "prims::", "sbpflow::")  # namespaces of ops whose backward is the derivative, so that it is linear


@lru_cache(maxsize=1024)
def holds(target: torch.dtype, source: torch.dtype) -> bool:
    """Whether turning a number into `target` loses no bit of it; an imaginary part is no bit.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.float16, torch.bfloat16), holds(torch.float32, torch.int64)
    (True, False, False)
    """
    if source == target:
        return True
    target, source = target.to_real(), source.to_real()
    if torch.bool in (target, source):
        return source == target
    if not target.is_floating_point:
        return not source.is_floating_point and torch.iinfo(target).bits >= torch.iinfo(source).bits
    there = torch.finfo(target)
    if not source.is_floating_point:
        return 2 / there.eps >= torch.iinfo(source).max
    here = torch.finfo(source)
    return there.eps <= here.eps and there.max >= here.max and there.tiny <= here.tiny


def exact_groups(call: Call, groups: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The groups of linear inputs whose addends the outputs hold without loss: a cast to fewer bits adds up first.

    Under autocast any op may be such a cast.
    """
    kinds = {y.dtype for y in call.outputs}
    return tuple(group for group in groups if all(holds(kind, call.inputs[i].dtype) for kind in kinds for i in group))


def rounded(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The inputs to whose dtype a gradient is rounded: no output is as narrow as they are."""
    kinds = {y.dtype for y in outputs if _is_real(y.dtype)}
    if not kinds:
        return ()
    return tuple(
        i for i, x in enumerate(inputs) if _is_real(x.dtype) and not any(holds(x.dtype, kind) for kind in kinds)
    )


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def adds_up(op: torch._ops.OpOverload, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether an op's backward may take each rank's addend of a gradient and leave the sum for later.

    It is linear, if it is torch's own, and rounds nothing: a cast from bfloat16 wants its gradient added up first.
    """
    return op._schema.name.startswith(LINEAR) and not rounded(inputs, outputs)


def promotes(op: torch._ops.OpOverload) -> bool:
    """Whether an op of inputs of several dtypes is that op of the inputs cast to the widest."""
    return torch.Tag.pointwise in op.tags or "promotes" in traits(op._schema.name.removeprefix("aten::"))
