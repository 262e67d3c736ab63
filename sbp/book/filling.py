"""New tensors made after another: only its shape, dtype and device count, so that it may lie in any way."""

from functools import partial

import torch

from ..call import Call, Rewritten, Way
from ..rule import register
from ..state import State
from ..traits import named

__all__ = ["like", "new", "of_a_piece"]


@register(*named("like"))
def like(call: Call) -> list[Way]:
    """Ranks fill what they hold of it: split where it is, and whole where it is partial."""
    state = _state(call)
    return [Way((state,), (State(state.dims),))]


@register(*named("new"))
def new(call: Call) -> list[Way]:
    """The shape is an argument, so every rank fills the whole."""
    return [Way((_state(call),), (State(((),) * call.outputs[0].dim()),))]


def of_a_piece(op: torch._ops.OpOverload) -> Rewritten:
    """The op with the shape of a rank's piece in place of the `size` that it is called with."""
    at = [parameter.name for parameter in op._schema.arguments].index("size")
    return Rewritten(
        lambda piece, *args, **kwargs: (partial(op, **kwargs), (*args[:at], piece.shape(), *args[at + 1 :])),
        shapes=True,
    )


def _state(call: Call) -> State:
    return call.states[0] if call.states else State(((),) * call.inputs[0].dim())
