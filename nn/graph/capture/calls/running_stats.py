"""Running statistics: what batch_norm and instance_norm write to their buffers while training, as ops of their own.

torch's schemas do not tell that these two write. Here the norm itself is given no statistics, which it does not use
while training, and what they become is computed beside it, of the whole batch, without gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....sbp.call import Ref
from ..tape import Tape

__all__ = ["NORMS", "statistics"]

aten = torch.ops.aten
NORMS = (aten.batch_norm.default, aten.instance_norm.default)


def statistics(tape: Tape, op: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments to call the norm with; ops that write to its statistics instead of it are put on the tape."""
    x, weight, bias, mean, var, training, momentum, *rest = args
    if not training or mean is None:
        return tuple(args)
    apart = [*range(2, x.dim())]  # every instance has its own, of which the mean is kept
    dims = apart if op is aten.instance_norm.default else [0, *apart]
    value = Ref(tape.number(x))
    if x.dtype != mean.dtype:
        value = Ref(tape.make(aten.to.dtype, value, mean.dtype, grad=False))
    new = (
        tape.make(aten.mean.dim, value, dims, grad=False),
        tape.make(aten.var.correction, value, dims, correction=1, grad=False),
    )
    for kept, number in zip((mean, var), new, strict=True):
        if op is aten.instance_norm.default:
            number = tape.make(aten.mean.dim, Ref(number), [0], grad=False)
        _blend(tape, kept, number, momentum)
    return x, weight, bias, None, None, training, momentum, *rest


def _blend(tape: Tape, kept: Tensor, number: int, momentum: float) -> None:
    view = tape.view(kept)
    old = tape.make(aten.mul.Scalar, Ref(tape.read(view)), 1 - momentum, grad=False)
    new = tape.make(aten.mul.Scalar, Ref(number), momentum, grad=False)
    tape.write(view, tape.make(aten.add.Tensor, Ref(old), Ref(new), grad=False))
