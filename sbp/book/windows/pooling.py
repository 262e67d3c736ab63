"""Pools: batch and channels split, and dims of space with windows; what lies around a tensor is zero, or less than all.

A pool that adapts to one place is a mean over all of a dim, or a maximum. One that adapts to more is one of windows
where these are as long as each other.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Match, Piece, Rewritten
from ...rule import register
from ...state import Window
from ..labels import labelled
from .reach import is_split, margins, padded, per_dim, seen_by

__all__: list[str] = []

Around = tuple[tuple[int, int], ...]


@register(
    "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
)  # fmt: skip
def maxima(call: Call) -> Match:
    """Indices are those of the whole tensor."""
    windows = _windows(call)
    return seen_by(_spaced(call, len(windows)), windows, Rewritten(partial(_near_maxima, call, windows)))


@register("avg_pool1d", "avg_pool2d", "avg_pool3d")
def means(call: Call) -> Match:
    windows = _windows(call)
    return seen_by(_spaced(call, len(windows), linear=[(0,)]), windows, Rewritten(partial(_near_means, call, windows)))


@register(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"
)
def adaptive_means(call: Call) -> Match:
    x, y = call.inputs[0].shape, call.outputs[0].shape
    count = int(call.name.rpartition("d")[0][-1])
    first = len(x) - count
    labels: list[Hashable] = [*range(first)]
    out, windows = list(labels), dict[int, Window]()
    reduced: dict[Hashable, str] = {}
    for d in range(first, len(x)):
        even = y[d] > 1 and x[d] % y[d] == 0
        labels.append(d if even or y[d] == 1 else None)
        out.append(d if even else None)
        if even:
            step = x[d] // y[d]
            windows[d] = Window(y[d], 0, step - 1, step)
        elif y[d] == 1:
            reduced[d] = "avg"
    match = labelled(call, [labels], [out], reduced=reduced, linear=[(0,)])
    return seen_by(match, windows, Rewritten(partial(_near_adaptive, call, count)))


@register("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_maxima(call: Call) -> Match:
    """Indices are those of the whole tensor."""
    x, y = call.inputs[0].shape, call.outputs[0].shape
    first = len(x) - int(call.name[len("adaptive_max_pool")])
    steps = {d: x[d] // y[d] for d in range(first, len(x)) if y[d] > 1 and x[d] % y[d] == 0}
    labels: list[Hashable] = [d if d < first or d in steps else None for d in range(len(x))]
    windows = {d: Window(y[d], 0, step - 1, step) for d, step in steps.items()}
    match = labelled(call, [labels], [labels, labels])
    return seen_by(match, windows, Rewritten(partial(_near_largest, call, len(x) - first)))


def _near_largest(
    call: Call, count: int, piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    dims = range(len(piece.inputs[0].shape) - count, len(piece.inputs[0].shape))
    first = tuple((piece.spans(0, d) or ((0, 0),))[0][0] for d in dims)
    return partial(_largest_of_pieces, call, tuple(piece.shape()[-count:]), first), (x,)


def _largest_of_pieces(call: Call, size: tuple[int, ...], first: tuple[int, ...], x: Tensor) -> Any:
    values, at = call.op(x, list(size))
    return values, _places(at, x.shape[-len(size) :], ((0, 0),) * len(size), first, call.inputs[0].shape[-len(size) :])


def _places(at: Tensor, held: Sequence[int], around: Around, first: Sequence[int], whole: Sequence[int]) -> Tensor:
    """Indices into what a rank holds, with what is put around it, as indices into the whole."""
    places = torch.zeros_like(at)
    for d in range(len(held)):
        along = at // prod(held[d + 1 :]) % held[d] - around[d][0] + first[d]
        places = places + along * prod(whole[d + 1 :])
    return places


def _near_adaptive(
    call: Call, count: int, piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return call.op, (x, list(piece.shape()[-count:]))


def _spaced(call: Call, count: int, linear: Sequence[Sequence[int]] = ()) -> Match:
    labels = range(call.inputs[0].dim())
    return labelled(call, [labels], [labels] * len(call.outputs), linear=linear)


def _windows(call: Call) -> dict[int, Window]:
    count, ndim = int(call.name[len("max_pool")]), call.inputs[0].dim()
    kernel, stride, padding, dilation = _said(call, count)
    return {
        ndim - count + d: Window(call.outputs[0].shape[ndim - count + d], -padding[d], reach - padding[d], stride[d])
        for d, reach in enumerate(n * (k - 1) for n, k in zip(dilation, kernel, strict=True))
    }


def _said(call: Call, count: int) -> tuple[list[int], list[int], list[int], list[int]]:
    bound = call.bound
    kernel = per_dim(bound["kernel_size"], count)
    stride = per_dim(bound["stride"], count) if bound["stride"] else kernel
    return kernel, stride, per_dim(bound["padding"], count), per_dim(bound.get("dilation", 1), count)


def _around(call: Call, windows: dict[int, Window], piece: Piece, every: bool) -> tuple[Around, tuple[int, ...]]:
    """The places put around a rank's part, dim by dim, and the padding that the op is left with."""
    by_hand = [every or is_split(piece, dim) for dim in windows]
    around = tuple(
        margins(piece, d, w) if hand else (0, 0) for (d, w), hand in zip(windows.items(), by_hand, strict=True)
    )
    pads = _said(call, len(windows))[2]
    return around, tuple(0 if hand else pad for hand, pad in zip(by_hand, pads, strict=True))


def _near_maxima(
    call: Call, windows: dict[int, Window], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    around, padding = _around(call, windows, piece, call.bound["ceil_mode"] or len(call.outputs) > 1)
    first = tuple((piece.spans(0, d) or ((0, 0),))[0][0] for d in windows)
    return partial(_largest, call, around, padding, first), (x,)


def _largest(call: Call, around: Around, padding: tuple[int, ...], first: tuple[int, ...], x: Tensor) -> Any:
    count = len(around)
    kernel, stride, _, dilation = _said(call, count)
    kind = x.dtype
    least = -torch.inf if kind.is_floating_point else torch.iinfo(kind).min
    wide = padded(x, around, least)
    found = call.op(wide, kernel, stride, padding, dilation)
    if len(call.outputs) == 1:
        return found
    values, at = found
    return values, _places(at, wide.shape[-count:], around, first, call.inputs[0].shape[-count:])


def _near_means(
    call: Call, windows: dict[int, Window], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    bound, count = call.bound, len(windows)
    kernel, stride, pads = _said(call, count)[:3]
    every = bound["ceil_mode"] or not bound["count_include_pad"]
    around, padding = _around(call, windows, piece, every)
    shares: list[tuple[float, ...]] = []  # of each dim: by how much more than by its own places a mean is divided
    if every and not bound.get("divisor_override"):
        for d, k, s, pad in zip(windows, kernel, stride, pads, strict=True):
            n = call.inputs[0].shape[d]
            ((lo, hi),) = piece.out_spans(0, d)
            starts = [o * s - pad for o in range(lo, hi)]
            ends = [min(start + k, n + pad) for start in starts]
            if not bound["count_include_pad"]:
                starts, ends = [max(start, 0) for start in starts], [min(end, n) for end in ends]
            shares.append(tuple([k / (end - start) for start, end in zip(starts, ends, strict=True)]))
    return partial(_mean, call, around, padding, tuple(shares)), (x,)


def _mean(
    call: Call, around: Around, padding: tuple[int, ...], shares: tuple[tuple[float, ...], ...], x: Tensor
) -> Tensor:
    count = len(around)
    kernel, stride, _, _ = _said(call, count)
    divisor = call.bound.get("divisor_override")
    y: Tensor = call.op(padded(x, around), kernel, stride, padding, False, True, *([divisor] if divisor else []))
    for d, share in enumerate(shares):
        if any(one != 1 for one in share):
            y = y * y.new_tensor(share).reshape(-1, *[1] * (count - 1 - d))
    return y
