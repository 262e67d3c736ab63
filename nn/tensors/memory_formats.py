"""Memory formats: the order of dims in a kernel's result where torch's meta functions say another. Pieces lie in the
memory order of their tensor.

Random numbers are drawn in this order, and by it torch tells whether a reshape is a view or a copy. So that what is one
for the whole tensor is one for every piece, dims that follow each other without a gap in one device's memory do so in
each piece. The rows are those of kernels for "cpu", each tried against its meta function.
"""

from typing import Any

import torch
from torch import Tensor

from ...boxing.memory import follows
from ...sbp import Layout
from ...sbp.layout import memory_order

__all__ = ["as_laid", "in_order", "is_in_order", "shares_memory"]

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


def in_order(piece: Tensor, of: Layout) -> Tensor:
    """The piece of a tensor, or a copy of it whose dims lie as the tensor's do on one device, without gaps.

    >>> from ...placement import placement
    >>> from ...sbp.state import State
    >>> columns = Layout(placement("cpu:[0-1]"), State(((0,), ())), (4, 3), torch.float32, order=(1, 0))
    >>> in_order(torch.ones(2, 3), columns).stride()
    (1, 2)
    """
    if is_in_order(piece, of):
        return piece
    order = of.order or tuple(sorted(range(piece.ndim), key=lambda d: -of.strides[d]))
    back = sorted(range(len(order)), key=order.__getitem__)
    return piece.permute(order).contiguous().permute(back)


def is_in_order(piece: Tensor, of: Layout) -> bool:
    """Whether dims that follow each other without a gap in one device's memory do so in this piece."""
    if of.in_rows and piece.is_contiguous():
        return True
    if not piece.numel():
        return True
    shape, strides = piece.shape, piece.stride()
    return all(follows(run, dense, shape, strides) for run, dense in _runs(of))


def _runs(of: Layout) -> list[tuple[list[int], bool]]:
    """The dims that follow each other without a gap, from the innermost, and whether its elements are neighbours."""
    known: list[tuple[list[int], bool]] | None = of.memo.get("runs")
    if known is None:
        sizes, strides = of.shape, of.strides
        dims = sorted((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: (strides[d], -d))
        known = []
        for d in dims:
            last = known[-1][0][-1] if known else d
            if known and strides[d] and strides[d] == strides[last] * sizes[last]:
                known[-1][0].append(d)
            else:
                known.append(([d], strides[d] == 1))
        of.memo["runs"] = known
    return known


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in one memory. Not by address, as what is empty has none."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
