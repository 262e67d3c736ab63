"""Windows along a dim, as a dim of their own or as columns; dims that lose or gain places at their ends.

Where the dim is split, the windows reach into the next rank's piece, and the pieces of what is left begin elsewhere.
Stencils are written so: `x[1:] - x[:-1]` takes one row of a neighbour.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Match, Piece, Rewritten
from ...rule import register
from ...state import Window
from ..labels import labelled
from ..slices import part_of
from .reach import margins, padded, per_dim, seen_by

__all__: list[str] = []


@register("unfold")
def unfold(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    dim, size, step = call.bound["dimension"], call.bound["size"], call.bound["step"]
    if not ndim:
        return labelled(call, [[]], [[None]], linear=[(0,)], hollow=True)
    dim %= ndim
    match = labelled(call, [range(ndim)], [[*range(ndim), None]], linear=[(0,)], hollow=True)
    window = Window(call.outputs[0].shape[dim], 0, size - 1, step)
    return seen_by(match, {dim: window}, Rewritten(partial(_unfolded, dim, size, step)))


def _unfolded(
    dim: int, size: int, step: int, piece: Piece, x: Any, *_: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not piece.out_spans(0, dim):
        return partial(_none, piece.shape()), (x,)
    return torch.Tensor.unfold, (x, dim, size, step)


@register("im2col")
def columns(call: Call) -> Match:
    """Windows of a plane, one after the other. Rows of windows are split where their pieces are pieces of all: evenly,
    or one window a row. A single row is split into its windows."""
    x, bound = call.inputs[0], call.bound
    kernel, dilation, stride, pads = (
        per_dim(bound[name], 2) for name in ("kernel_size", "dilation", "stride", "padding")
    )
    sizes = [
        (n + 2 * pad - d * (k - 1) - 1) // s + 1
        for n, k, d, s, pad in zip(x.shape[-2:], kernel, dilation, stride, pads, strict=True)
    ]
    along = 1 if sizes[0] == 1 else 0
    dim, pad = x.dim() - 2 + along, pads[along]
    window = Window(sizes[along], -pad, dilation[along] * (kernel[along] - 1) - pad, stride[along])
    lead: list[Hashable] = ["samples"] if x.dim() == 4 else []
    labels = [*lead, None, *(("windows", None) if along == 0 else (None, "windows"))]
    shared: dict[Hashable, tuple[int, tuple[int, ...]]] = {"windows": (sizes[0], ())} if min(sizes) > 1 else {}
    match = labelled(call, [labels], [[*lead, None, "windows"]], linear=[(0,)], shared=shared)
    return seen_by(match, {dim: window}, Rewritten(partial(_columns, call, along, window)))


def _columns(
    call: Call, along: int, window: Window, piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    shape = piece.inputs[0].shape
    dim, places = len(shape) - 2 + along, piece.outputs[0].shape[-1] // window.size  # of the result in a row of windows
    ((lo, hi),) = ((a // places, b // places) for a, b in piece.out_spans(0, len(piece.outputs[0].shape) - 1))
    seen, end = lo * window.step + window.first, (hi - 1) * window.step + window.last + 1
    held = piece.spans(0, dim)  # none where all windows see but padding
    before, behind = (held[0][0] - seen, end - held[0][1]) if held else (end - seen, 0)
    pad = per_dim(call.bound["padding"], 2)
    around = [(before, behind), (0, 0)] if along == 0 else [(before, behind)]
    pad[along] = 0
    return partial(_as_columns, call, tuple(around), tuple(pad)), (x,)


def _as_columns(call: Call, around: tuple[tuple[int, int], ...], pad: tuple[int, ...], x: Tensor) -> Tensor:
    return call.op(padded(x, around), *(call.bound[n] for n in ("kernel_size", "dilation")), pad, call.bound["stride"])  # type: ignore[no-any-return]


def _none(shape: tuple[int, ...], x: Tensor) -> Tensor:
    """No places at all, made of what there is, so that a gradient finds its way."""
    return x.reshape(-1)[:0].reshape(shape)


@register("slice.Tensor", "narrow")
def cut(call: Call) -> Match:
    """A slice: ranks keep pieces where it goes through more than half of a dim, in steps or in a row, and hold addends
    otherwise."""
    x, dim = call.inputs[0], call.bound["dim"] % call.inputs[0].dim()
    size, step, count = x.shape[dim], call.bound.get("step", 1), call.outputs[0].shape[dim]
    labels: list[Hashable] = list(range(x.dim()))
    if step == 1 and count == size and call.name == "slice.Tensor":
        return labelled(call, [labels], [labels], linear=[(0,)], hollow=True)  # pieces clamp to what they have
    start = call.bound["start"] or 0
    start = max(start + size, 0) if start < 0 else min(start, size)
    addends = part_of(call, dim, range(start, start + step * count, step))
    if count < 2 or 2 * step * count <= size:
        return addends
    match = labelled(call, [labels], [labels], linear=[(0,)], hollow=True)
    near = Rewritten(_as_seen if step == 1 else partial(_in_steps, dim, start, step))
    first = start - start % step  # seen are all places of a step, so that slices that interleave want the same
    return replace(seen_by(match, {dim: Window(count, first, first + step - 1, step)}, near), alone=addends)


def _as_seen(piece: Piece, x: Any, *_: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The very places that windows of one place see."""
    return torch.Tensor.view_as, (x, x)


def _in_steps(
    dim: int, start: int, step: int, piece: Piece, x: Any, *_: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The places that are wanted of those that a rank has, run by run where it has several."""
    runs, before = list[tuple[int, int]](), 0
    for low, high in piece.spans(0, dim):
        wanted = [each for each in piece.out_spans(0, dim) if low <= each[0] * step + start < high]
        firsts = [(begin * step + start - low + before, (end - begin) * step) for begin, end in wanted]
        runs += [(first, first + length) for first, length in firsts]
        before += high - low
    if len(runs) > 1:
        return partial(_runs, dim, tuple(runs), step), (x,)
    first, end = runs[0] if runs else (0, 0)
    return torch.ops.aten.slice.Tensor, (x, dim, first, end, step)


def _runs(dim: int, runs: tuple[tuple[int, int], ...], step: int, x: Tensor) -> Tensor:
    return torch.cat([torch.ops.aten.slice.Tensor(x, dim, first, end, step) for first, end in runs], dim)


@register("constant_pad_nd")
def pad(call: Call) -> Match:
    """A sum passes through where zeros are added."""
    x, y, amounts = call.inputs[0], call.outputs[0], list(call.bound["pad"])
    pairs = {x.dim() - 1 - at // 2: tuple(amounts[at : at + 2]) for at in range(0, len(amounts), 2)}
    labels = range(x.dim())
    linear = [(0,)] if call.bound["value"] == 0 else []
    windows = {d: Window(y.shape[d], -pair[0], -pair[0]) for d, pair in sorted(pairs.items()) if any(pair)}
    match = labelled(call, [labels], [labels], linear=linear, hollow=True)
    return seen_by(match, windows, Rewritten(partial(_padded, call, windows)))


def _padded(
    call: Call, windows: dict[int, Window], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if any(not held for d in windows for held in [piece.out_spans(0, d)]):
        return partial(_none, piece.shape()), (x,)
    first = min(windows)
    each = range(first, call.inputs[0].dim())
    around = tuple(margins(piece, d, windows[d]) if d in windows else (0, 0) for d in each)
    return partial(padded, around=around, value=call.bound["value"]), (x,)
