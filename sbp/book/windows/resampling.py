"""Upsampling by whole factors: dims of space split; a place beside the end of a rank's part may lean on the next.
Shuffles of channels into space and back: a place has its channels, or its channels their places.

Other factors, corners that are aligned, and cubic ones: what the window runs over stays whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...call import Call, Match, Piece, Rewritten
from ...rule import register
from ...state import Window
from ..labels import called_with, labelled
from .reach import padded, seen_by

__all__: list[str] = []

NEAREST = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
LINEAR = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")


@register(*NEAREST, *(f"{name}.vec" for name in NEAREST), *LINEAR, *(f"{name}.vec" for name in LINEAR))
def upsample(call: Call) -> Match:
    x, y = call.inputs[0].shape, call.outputs[0].shape
    first, linear = 2, "linear" in call.name
    times = [b // a if a and b % a == 0 else 0 for a, b in zip(x[first:], y[first:], strict=True)]
    said = _scales(call, len(times))
    plain = not call.bound.get("align_corners") and all(s is None or s == t for s, t in zip(said, times, strict=True))
    windows = {
        first + d: Window(n, 2 - 3 * t, 1 + t, 2, 2 * t) if linear else Window(n, 1 - t, 0, 1, t)
        for d, (n, t) in enumerate(zip(y[first:], times, strict=True))
        if plain and t > 0
    }
    labels = [d if d < first or d in windows else None for d in range(len(x))]
    match = labelled(call, [labels], [labels], linear=[(0,)])
    return seen_by(match, windows, Rewritten(partial(_near, call, tuple(windows), times)))


def _scales(call: Call, count: int) -> list[float | None]:
    """The factors that are said; where none is, they follow from the sizes."""
    if "scale_factors" in call.bound:
        return list(call.bound["scale_factors"] or [None] * count)
    return [value for name, value in call.bound.items() if name.startswith("scales")]


def _near(
    call: Call, dims: tuple[int, ...], times: list[int], piece: Piece, x: Any, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    sizes, around = list(call.outputs[0].shape[2:]), [(0, 0)] * len(times)
    for d in dims:
        ((lo, hi),), t = piece.out_spans(0, d), times[d - 2]
        ((first, end),) = piece.spans(0, d)
        sizes[d - 2], around[d - 2] = (end - first) * t, (first * t - lo, hi - end * t)
    return partial(_upsampled, call, tuple(sizes), tuple(around)), (x,)


def _upsampled(call: Call, sizes: tuple[int, ...], around: tuple[tuple[int, int], ...], x: Tensor) -> Tensor:
    """All of what a rank has, of which it takes its part."""
    changed = {"output_size": list(sizes)}
    if "scale_factors" in call.bound:
        changed["scale_factors"] = None  # type: ignore[assignment]
    names = [parameter.name for parameter in call.op._schema.arguments]
    rest = {name: value for name, value in call.bound.items() if name != names[0]}
    return padded(called_with(call.op, (x,), rest, **changed), around)


@register("pixel_unshuffle")
def unshuffle(call: Call) -> Match:
    """Every so many places in a row become one."""
    by = call.bound["downscale_factor"]
    return _shuffled(call, call.inputs[0].shape[-3], lambda n: Window(n, 0, by - 1, by), by, 1)


@register("pixel_shuffle")
def shuffle(call: Call) -> Match:
    """A place becomes so many in a row."""
    by = call.bound["upscale_factor"]
    return _shuffled(call, call.outputs[0].shape[-3], lambda n: Window(n, 1 - by, 0, 1, by), 1, by)


def _shuffled(call: Call, channels: int, window: Callable[[int], Window], step: int, per: int) -> Match:
    """Channels are split where ranks have all those that a place becomes, or is made of."""
    labels = range(call.inputs[0].dim())
    c, *space = labels[-3:]
    match = labelled(call, [labels], [labels], linear=[(0,)], shared={c: (channels, ())})
    windows = {d: window(call.outputs[0].shape[d]) for d in space}
    return seen_by(match, windows, Rewritten(partial(_near_shuffled, call, step, per)))


def _near_shuffled(
    call: Call, step: int, per: int, piece: Piece, x: Any, by: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    around = []
    ndim = call.inputs[0].dim()
    for d in (ndim - 2, ndim - 1):
        ((lo, hi),), ((first, end),) = piece.out_spans(0, d), piece.spans(0, d)
        around.append((first * per // step - lo, hi - end * per // step))
    return partial(_shuffled_part, call.op, by, tuple(around)), (x,)


def _shuffled_part(op: Any, by: int, around: tuple[tuple[int, int], ...], x: Tensor) -> Tensor:
    return padded(op(x, by), around)
