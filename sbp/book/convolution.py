"""Convolutions: samples and output channels split, input channels leave addends; where windows reach stays whole."""

from collections.abc import Hashable
from math import prod
from typing import Any

from torch import Tensor

from ..call import Call, Match, Piece
from ..registry import register
from .labels import called_with, labelled, named, position

__all__: list[str] = []

TRANSPOSED = ("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")


@register(
    "convolution", "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding", *TRANSPOSED
)
def convolution(call: Call) -> Match:
    bound = call.bound
    weight, space = bound["weight"], [None] * (bound["weight"].dim() - 2)
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
    return labelled(
        call,
        named(
            call,
            input=[*many, labels["from"], *space],
            weight=[labels["rows"], labels["columns"], *space],
            bias=[labels["to"]],
        ),
        [[*many, labels["to"], *space]],
        reduced={"from": "sum"},
        linear=[(0, *group), (1, *group)],
        addends=group,
        local=_with_own_groups(call) if bound["groups"] > 1 else None,
    )


def _splits_evenly(call: Call) -> bool:
    """Whether ranks hold whole groups of every tensor: all pieces are even, or a group is one channel everywhere."""
    groups, channels = call.bound["groups"], call.bound["weight"].dim() - 2
    sizes = {call.inputs[0].shape[-channels - 1], call.outputs[0].shape[-channels - 1]}
    return sizes == {groups} or (bool(call.sizes) and groups % prod(call.sizes) == 0)


def _with_own_groups(call: Call) -> Any:
    dim = call.bound["weight"].dim() - 2
    channels = call.inputs[0].shape[-dim - 1]

    def local(piece: Piece, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        groups = call.bound["groups"] * x.shape[-dim - 1] // channels
        return called_with(call.op, (x, *args), kwargs, groups=groups)  # type: ignore[no-any-return]

    return local
