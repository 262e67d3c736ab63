"""New tensors made after another: only its shape, dtype and device count, so that it may lie in any way."""

from ..call import Call, Way
from ..rule import register
from ..state import State
from ..traits import named

__all__ = ["like", "new"]


@register(*named("like"))
def like(call: Call) -> list[Way]:
    """Ranks fill what they hold of it: split where it is, and whole where it is partial."""
    state = _state(call)
    return [Way((state,), (State(state.dims),))]


@register(*named("new"))
def new(call: Call) -> list[Way]:
    """The shape is an argument, so every rank fills the whole."""
    return [Way((_state(call),), (State(((),) * call.outputs[0].dim()),))]


def _state(call: Call) -> State:
    return call.states[0] if call.states else State(((),) * call.inputs[0].dim())
