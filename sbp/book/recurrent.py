"""Recurrent layers: samples split. Time is one after the other, and features are all needed at every moment."""

from typing import Any

from torch import Tensor

from ..call import Call, Match, Piece
from ..recurrent import layer
from ..rule import register
from .labels import labelled, named

__all__: list[str] = []


@register("sbpflow::recurrent")
def recurrent(call: Call) -> Match:
    bound = call.bound
    states = [[None, "sample", None] for _ in bound["states"]]
    labels: dict[str, Any] = {
        "x": [None, "sample", None],
        "lengths": ["sample"],
        "states": states,
        "weights": [[None] * w.dim() for w in bound["weights"]],
    }
    return labelled(call, named(call, **labels), [[None, "sample", None], *states], hollow=True, local=_layer)


def _layer(piece: Piece, *args: Any) -> list[Tensor]:
    return layer(*args)


@register("sbpflow::lengths")
def lengths(call: Call) -> Match:
    """Looked at together."""
    return labelled(call, [[None]], [[None]])


@register("sbpflow::packed_noise")
def noise(call: Call) -> Match:
    """Never split: noise for packed sequences is drawn for the whole batch, in the order of lengths."""
    return labelled(call, [[None]], [[None] * 3])
