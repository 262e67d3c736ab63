"""Windows along a dim as a dim of their own: they reach into each other, and so into the next rank's piece."""

from functools import partial
from typing import Any

import torch

from ...call import Call, Match, Piece, Rewritten
from ...registry import register
from ...state import Window
from ..labels import labelled
from .reach import seen_by

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
    return seen_by(match, {dim: window}, Rewritten(partial(_near, dim, size, step)))


def _near(dim: int, size: int, step: int, piece: Piece, x: Any, *_: Any) -> tuple[Any, tuple[Any, ...]]:
    if not piece.out_spans(0, dim):
        return partial(_none, piece.shape()), (x,)
    return torch.Tensor.unfold, (x, dim, size, step)


def _none(shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """No windows at all, made of what there is, so that a gradient finds its way."""
    return x.reshape(-1)[:0].reshape(shape)
