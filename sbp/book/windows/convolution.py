"""Convolutions: samples and output channels split, input channels leave addends; dims of space split with windows."""

from collections.abc import Callable, Hashable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Match, Piece, Rewritten
from ...rule import register
from ...state import Window
from ..labels import called_with, labelled, named, position
from .reach import is_split, margins, padded, per_dim, seen_by

__all__: list[str] = []

TRANSPOSED = ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")


@register(
    "convolution", "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", *TRANSPOSED
)
def convolution(call: Call) -> Match:
    bound = call.bound
    weight, space = bound["weight"], [("space", d) for d in range(bound["weight"].dim() - 2)]
    transposed = call.name in TRANSPOSED or bound.get("transposed", False)
    many: list[Hashable] = ["samples"] if bound["input"].dim() == weight.dim() else []
    labels: dict[str, Hashable]
    if bound["groups"] == 1:
        labels = {"from": "from", "to": "to", "rows": "from" if transposed else "to"}
        labels["columns"] = "to" if transposed else "from"
    else:
        label = "group" if _splits_evenly(call) else None
        labels = {"from": label, "to": label, "rows": label, "columns": None}
    bias = bound["bias"] is not None
    group = {position(call, "bias")} if bias else set()
    match = labelled(
        call,
        named(
            call,
            input=[*many, labels["from"], *space],
            weight=[labels["rows"], labels["columns"], *[None] * len(space)],
            bias=[labels["to"]],
        ),
        [[*many, labels["to"], *space]],
        reduced={"from": "sum"},
        linear=[(0, *group), (1, *group)],
        addends=group,
        local=_with_own_groups(call) if bound["groups"] > 1 else None,
    )
    first = len(many) + 1
    windows = {first + d: window for d, window in enumerate(_transposed(call) if transposed else _windows(call))}
    near = _near_transposed if transposed else _near
    return seen_by(match, windows, Rewritten(partial(near, call, windows)))


def _splits_evenly(call: Call) -> bool:
    """Whether ranks hold whole groups of every tensor: all pieces are even, or a group is one channel everywhere."""
    groups, channels = call.bound["groups"], call.bound["weight"].dim() - 2
    sizes = {call.inputs[0].shape[-channels - 1], call.outputs[0].shape[-channels - 1]}
    return sizes == {groups} or (bool(call.sizes) and groups % prod(call.sizes) == 0)


def _with_own_groups(call: Call) -> Any:
    def local(piece: Piece, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return called_with(call.op, (x, *args), kwargs, groups=_groups(call, x))  # type: ignore[no-any-return]

    return local


def _groups(call: Call, x: Tensor) -> int:
    """How many groups these input channels are."""
    channels = 1 - call.bound["weight"].dim()
    if call.bound["groups"] == 1:
        return 1
    return int(call.bound["groups"] * x.shape[channels] // call.inputs[0].shape[channels])


def _said(call: Call, name: str) -> list[int]:
    return per_dim(call.bound[name], call.bound["weight"].dim() - 2)


def _spread(call: Call) -> list[int]:
    """How far the first and the last place that a window sees are apart."""
    return [d * (k - 1) for d, k in zip(_said(call, "dilation"), call.bound["weight"].shape[2:], strict=True)]


def _before(call: Call) -> list[int]:
    """The padding before each dim; of `same` there may be one place more behind it."""
    said = call.bound["padding"]
    if isinstance(said, str):
        return [reach // 2 if said == "same" else 0 for reach in _spread(call)]
    return per_dim(said, len(_spread(call)))


def _windows(call: Call) -> list[Window]:
    sizes = call.outputs[0].shape[-len(_spread(call)) :]
    each = zip(sizes, _before(call), _spread(call), _said(call, "stride"), strict=True)
    return [Window(size, -pad, reach - pad, stride) for size, pad, reach, stride in each]


def _transposed(call: Call) -> list[Window]:
    """A place i of the input adds to those from i * stride - padding on, in the steps of the dilation."""
    sizes = call.outputs[0].shape[-len(_spread(call)) :]
    each = zip(sizes, _before(call), _spread(call), _said(call, "stride"), strict=True)
    return [Window(size, pad - reach, pad, 1, stride) for size, pad, reach, stride in each]


def _near(
    call: Call, windows: dict[int, Window], piece: Piece, x: Any, weight: Any, bias: Any = None, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The convolution of what a rank's windows see; there is nothing else than that beside it, but for padding."""
    around, padding = [], []
    spread, before = _spread(call), _before(call)
    for at, (dim, window) in enumerate(windows.items()):
        lopsided = call.bound["padding"] == "same" and spread[at] % 2  # a place more behind than before
        by_hand = lopsided or is_split(piece, dim)
        around.append(margins(piece, dim, window) if by_hand else (0, 0))
        padding.append(0 if by_hand else before[at])
    run = partial(_convolved, call, tuple(around), tuple(padding))
    return run, (x, weight, bias)


def _convolved(
    call: Call,
    around: tuple[tuple[int, int], ...],
    padding: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    stride, dilation = _said(call, "stride"), _said(call, "dilation")
    plain, x = (0,) * len(padding), padded(x, around)
    many = x if x.dim() == weight.dim() else x[None]
    y = torch.convolution(many, weight, bias, stride, padding, dilation, False, plain, _groups(call, x))
    return y if many is x else y[0]


def _near_transposed(
    call: Call, windows: dict[int, Window], piece: Piece, x: Any, weight: Any, bias: Any = None, *_: Any, **__: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A rank's part of all that the places seen add to: cut, or filled up with places to which none adds."""
    around: list[tuple[int, int]] = []
    empty = False
    for dim, reach, pad, stride in zip(windows, _spread(call), _before(call), _said(call, "stride"), strict=True):
        ((lo, hi),) = piece.out_spans(0, dim)
        ((first, end),) = piece.spans(0, dim) or ((0, 1),)
        empty = empty or not piece.spans(0, dim)
        start = first * stride - pad
        around.append((start - lo, hi - (start + (end - 1 - first) * stride + reach + 1)))
    none = tuple((0, int(not piece.spans(0, dim))) for dim in windows)
    return partial(_transpose_convolved, call, none if empty else (), tuple(around)), (x, weight, bias)


def _transpose_convolved(
    call: Call,
    none: tuple[tuple[int, int], ...],
    around: tuple[tuple[int, int], ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    stride, dilation, plain = _said(call, "stride"), _said(call, "dilation"), [0] * len(around)
    x = padded(x, none)  # of nothing torch convolves nothing
    many = x if x.dim() == weight.dim() else x[None]
    y = torch.convolution(many, weight, None, stride, plain, dilation, True, plain, _groups(call, x))
    y = padded(y if many is x else y[0], around)
    return y if bias is None else y + bias.reshape(-1, *[1] * len(around))
