"""Running statistics: what batch_norm and instance_norm write to their buffers while training, as ops of their own.

torch's schemas do not tell that these two write. Here the norm itself is given no statistics, which it does not use
while training, and what they become is computed beside it, of the whole batch, without gradients.
"""

from collections.abc import Sequence
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor, nn

from .....sbp.call import Ref
from ..tape import Tape

__all__ = ["BY_COUNTER", "NORMS", "counter_of", "statistics"]

aten = torch.ops.aten
NORMS = (aten.batch_norm.default, aten.instance_norm.default)


BY_COUNTER = nan  # the value of a counter of batches, of which a norm without momentum makes its momentum


def counter_of(module: nn.Module | None) -> Tensor | None:
    """The counter of a norm of torch's own that has momentum=None, so that every batch counts alike."""
    own = isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module).__module__.startswith("torch.nn.")
    return getattr(module, "num_batches_tracked", None) if own and getattr(module, "momentum", 0) is None else None


def statistics(
    tape: Tape, op: torch._ops.OpOverload, args: Sequence[Any], counter: Tensor | None = None
) -> tuple[Any, ...]:
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
    part: float | Ref = momentum
    if isnan(momentum) and counter is not None:
        count = tape.make(aten.to.dtype, Ref(tape.number(counter)), mean.dtype, grad=False)
        part, momentum = Ref(tape.make(aten.reciprocal.default, Ref(count), grad=False)), 0.0
    for kept, number in zip((mean, var), new, strict=True):
        if op is aten.instance_norm.default:
            number = tape.make(aten.mean.dim, Ref(number), [0], grad=False)
        _blend(tape, kept, number, part)
    return x, weight, bias, None, None, training, momentum, *rest


def _blend(tape: Tape, kept: Tensor, number: int, part: float | Ref) -> None:
    """Let what was kept become what it was, and a part of the new."""
    view, op = tape.view(kept), aten.mul.Tensor if isinstance(part, Ref) else aten.mul.Scalar
    rest = Ref(tape.make(aten.rsub.Scalar, part, 1, grad=False)) if isinstance(part, Ref) else 1 - part
    old = tape.make(op, Ref(tape.read(view)), rest, grad=False)
    new = tape.make(op, Ref(number), part, grad=False)
    tape.write(view, tape.make(aten.add.Tensor, Ref(old), Ref(new), grad=False))
