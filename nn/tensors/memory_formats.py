"""Memory formats: how a kernel lays out its result where torch's meta functions say another order of dims.

Random numbers are drawn in this order. The rows are those of kernels for "cpu", each tried against its meta function.
"""

from typing import Any

import torch
from torch import Tensor

from ...sbp.layout import memory_order

__all__ = ["as_laid"]

# What comes out is channels last if the input is, and else row by row.
SUGGESTED = {
    *("aten::roll", "aten::channel_shuffle", "aten::batch_norm"),
    *(f"aten::{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)),
}
ROWS = {"aten::one_hot"}
LAST = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}


def as_laid(op: torch._ops.OpOverload, args: tuple[Any, ...], out: Any) -> Any:
    """The result of an op on tensors without values, its dims in the order that the kernel would leave.

    >>> x = torch.empty(1, 2, 3, 3, device="meta").to(memory_format=torch.channels_last)
    >>> as_laid(torch.ops.aten.roll.default, (x, [1], [1]), x.roll(1, 1)).stride()
    (18, 1, 6, 2)
    """
    name = op._schema.name
    if name in ROWS:
        return out.contiguous()
    if name not in SUGGESTED or not isinstance(out, Tensor):
        return out
    return out.contiguous(memory_format=LAST.get(memory_order(args[0]), torch.contiguous_format))
