"""Clipping behind a step: gradients that a graph has used up have no norm, which torch says as 0.

torch's own function is left as it is, but for what it does last, which tells where nothing was clipped.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ....boxing.record import user_line
from ...tensors.tensor import GlobalTensor

__all__ = ["install"]

_clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
_grouped = torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype  # type: ignore[attr-defined]


def _told(parameters: Iterable[Tensor] | Tensor, *args: Any, **kwargs: Any) -> None:
    """As torch clips; where all gradients went into the step of a graph, that is told."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    steps = {x._of_step for x in listed if isinstance(x, GlobalTensor)} - {""}
    if steps and all(x.grad is None for x in listed):
        warnings.warn(
            f"clip_grad_norm_ at {user_line()} clips nothing: {' and '.join(sorted(steps))} has used up the gradients "
            "in its step; give it clip_grad_norm=..., as in flow.compile(..., clip_grad_norm=1.0), and read grad_norm",
            stacklevel=2,
        )
    _clip(listed, *args, **kwargs)


def _grouped_or_told(tensorlistlist: list[list[Tensor | None]], with_indices: bool = False) -> dict[Any, Any]:
    """Gradients grouped by torch, or an error for none, of which it says "Expected !nested_tensorlist[0].empty()"."""
    if tensorlistlist and not tensorlistlist[0]:
        raise RuntimeError(
            f"clip_grad_value_ at {user_line()}: none of these parameters has a gradient\n"
            "  a compiled step with an optimizer has used its gradients up: make it by flow.compile(..., "
            "leave_gradients=True), clip, and call optimizer.step()"
        )
    return _grouped(tensorlistlist, with_indices)


def install() -> None:
    """Put ours in the place of torch's, once."""
    torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype = _grouped_or_told  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad._clip_grads_with_norm_ = _told
