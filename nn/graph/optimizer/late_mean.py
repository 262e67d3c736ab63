"""Means of late updates, which PipeMare's backward takes back: beside each parameter that has one, and as that lies.

They belong to the parameter and not to a step, so that they go on in a step of another shape or another plan, and in a
run that begins with a checkpoint.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ....sbp import Layout
from ...tensors.factories import whole_everywhere
from ...tensors.tensor import GlobalTensor, wrap
from ..compiler.generated_calls import Shards

__all__ = ["carry_mean", "late_mean", "means_of_step", "means_put", "put_mean", "wide", "wide_dtype"]

MEAN = "_late_mean"  # the attribute
_count = 0


def late_mean(parameter: Tensor) -> Tensor | None:
    """The mean of a parameter's last updates, if a step has kept one or one was loaded: global where that is."""
    mean: Tensor | None = vars(parameter).get(MEAN)
    return mean


def put_mean(parameter: Tensor, mean: Tensor | None) -> None:
    """Have a parameter go on with this mean, or begin anew."""
    global _count
    vars(parameter).pop(MEAN, None)
    if mean is not None:
        vars(parameter)[MEAN] = mean
        _count += 1


def means_put() -> int:
    """The number of times that a parameter got a mean: while it is the same, those that had none have none."""
    return _count


def carry_mean(before: Tensor, now: GlobalTensor) -> None:
    """The mean that a plain parameter was given goes to the global one that it became."""
    mean = None if before is now else late_mean(before)
    if mean is None:
        return
    put_mean(before, None)
    if not isinstance(mean, GlobalTensor):
        there = wide(now)
        with torch.no_grad():
            mean = whole_everywhere(mean.to(there.dtype), there.placement)
            moved = mean.to_global(sbp=now.sbp)
            mean = wrap(tuple([x.detach().clone() for x in moved._shards]), there)
    put_mean(now, mean)


def means_of_step(held: Mapping[str, GlobalTensor], corrected: Collection[str]) -> dict[str, Shards]:
    """The means of weights that a step corrects, which begin with zero. Means of others are forgotten, because it is
    about to change these without."""
    found: dict[str, Shards] = {}
    for name, x in held.items():
        if name not in corrected:
            put_mean(x, None)
            continue
        mean = late_mean(x)
        if mean is None:
            there = wide(x)
            shards = [torch.zeros_like(s.detach(), dtype=there.dtype) for s in x._shards]
            put_mean(x, mean := wrap(tuple(shards), there))
        assert isinstance(mean, GlobalTensor)
        found[name] = mean._shards
    return found


def wide(parameter: GlobalTensor) -> Layout:
    """The layout of a parameter's mean: as it lies itself, in float32 at least."""
    of = parameter._layout
    return Layout(of.placement, of.state, of.shape, wide_dtype(parameter.dtype), order=of.order)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the mean of a parameter of some dtype."""
    return torch.promote_types(dtype, torch.float32)
