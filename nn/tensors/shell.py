"""The empty tensors that global tensors are made on; C++ code that does not ask reads dtype and device from them."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...placement.world import device, owned
from ...sbp import Layout

__all__ = ["shell"]

_shells: dict[tuple[torch.dtype, str], Tensor] = {}


def shell(of: Layout) -> Tensor:
    """The empty tensor that global tensors of this dtype and device are made on; C++ code reads both from it."""
    known: Tensor | None = of.memo.get("shell")
    if known is None:
        kind = of.dtype, of.placement.type
        known = _shells.get(kind)
        if known is None:
            where = owned(of.placement)
            at = device(of.placement, where[0]) if where else "cpu"
            with _disable_current_modes():  # not without values because somebody captures something just now
                known = _shells[kind] = torch.empty(0, dtype=of.dtype, device=at)
        of.memo["shell"] = known
    return known
