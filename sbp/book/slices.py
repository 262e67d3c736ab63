"""A part of a dim by position: single indices, what `windows.cutting` has no better for, and writing a part back.

Where the dim is split, each rank puts what it holds of the part among zeros, which adds up to the part: nothing is sent
until somebody needs the sum. Such a result is a new tensor and no view.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Match, Piece, Rewritten
from ..rule import register
from .labels import labelled

__all__ = ["part_of"]


@register("select.int")
def select(call: Call) -> Match:
    x, dim = call.inputs[0], call.bound["dim"] % call.inputs[0].dim()
    index = call.bound["index"] % x.shape[dim]
    return part_of(call, dim, range(index, index + 1))


def part_of(call: Call, dim: int, chosen: range) -> Match:
    """The match of a call that picks these indices of a dim. A single one is dropped if the output lacks the dim."""
    x, y = call.inputs[0], call.outputs[0]
    labels: list[Hashable] = list(range(x.dim()))
    drops = y.dim() < x.dim()
    out = labels[:dim] + ([] if drops else [None]) + labels[dim + 1 :]
    if x.dtype == torch.bool:  # has no sum
        labels[dim] = None

    def local(piece: Piece, x: Tensor) -> Tensor:
        held = piece.spans(0, dim)
        lo, hi = held[0] if held else (0, 0)
        mine = [at for at, index in enumerate(chosen) if lo <= index < hi]
        first, count = (mine[0], len(mine)) if mine else (0, 0)
        start = chosen[first] - lo if mine else 0
        part = x.narrow(dim, start, (count - 1) * chosen.step + 1 if count else 0)
        if chosen.step > 1 and count:
            part = part[(slice(None),) * dim + (slice(None, None, chosen.step),)]
        after = len(chosen) - first - count
        padded = torch.constant_pad_nd(part, [0, 0] * (x.dim() - 1 - dim) + [first, after])
        return padded.squeeze(dim) if drops else padded

    def rewrite(piece: Piece, x: Tensor, *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        whole = sum(hi - lo for lo, hi in piece.spans(0, dim)) == call.inputs[0].shape[dim]
        return (call.op, (x, *args)) if whole else (partial(local, piece), (x,))

    return labelled(
        call,
        [labels],
        [out],
        reduced={} if labels[dim] is None else {dim: "sum"},
        linear=[(0,)],
        hollow=True,
        local=Rewritten(rewrite),
        reads=[dim],
    )


@register("slice_scatter", "select_scatter")
def write(call: Call) -> Match:
    """The dim that is written to stays whole."""
    ndim = call.inputs[0].dim()
    dim = call.bound["dim"] % ndim
    labels = [None if d == dim else d for d in range(ndim)]
    src = labels if call.name == "slice_scatter" else labels[:dim] + labels[dim + 1 :]
    return labelled(call, [labels, src], [labels], linear=[(0, 1)], hollow=True)


@register("diagonal_scatter")
def write_diagonal(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    gone = {call.bound["dim1"] % ndim, call.bound["dim2"] % ndim}
    labels = [None if d in gone else d for d in range(ndim)]
    src = [d for d in range(ndim) if d not in gone]
    return labelled(call, [labels, [*src, None]], [labels], linear=[(0, 1)], hollow=True)
