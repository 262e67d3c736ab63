"""Calls that a composite fixes on one axis: their options are those of the rule book on the other axes, and the
composite's signature on this one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...placement.errors import SbpError
from ..call import Call, Match, Way
from ..logical import Fixed, LogicalOp, Seen, Stripes
from ..signature import B, Sbp, Split
from ..state import Lie, State, trim
from .options import Option, Reach, answer_of, options, way_of

__all__ = ["fixed_options", "fixed_way", "options_of"]


def options_of(op: LogicalOp, call: Call, reach: Sequence[Reach], grads: Sequence[bool]) -> list[Option]:
    """Every option of an op, or those that a composite leaves of them."""
    return options(call, reach, grads) if op.fixed is None else fixed_options(call, reach, grads, op.fixed)


def fixed_options(call: Call, reach: Sequence[Reach], grads: Sequence[bool], fixed: Fixed) -> list[Option]:
    """Every option of a call; one that cuts a dim on another axis too, which the composite cuts, is none."""
    axis = fixed.round.axis
    if call.sizes[axis] == 1:
        return options(call, reach, grads)
    apart = [of._replace(states=tuple(state for state in of.states if axis not in state.split)) for of in reach]
    found = options(_without(call, axis), apart, grads)
    made = list(_on_axis(call, found, fixed))
    if not made:
        raise SbpError(
            f"{call.name} cannot lie as its composite says: {fixed.inputs} -> {fixed.outputs}\n"
            "  every way that its rule knows cuts the same dims on other axes; write the composite for other dims"
        )
    return made


def _on_axis(call: Call, found: Sequence[Option], fixed: Fixed) -> Iterator[Option]:
    axis, said = fixed.round.axis, (*fixed.inputs, *fixed.outputs)
    active = any(entry is not B for entry in said)
    tensors = (*call.inputs, *call.outputs)
    for option in found:
        lies = (*option.inputs, *option.outputs)
        twice = any(
            isinstance(e, Split | Stripes | Seen) and lie.state.dims[e.dim] for lie, e in zip(lies, said, strict=True)
        )
        if twice:
            continue
        made = [
            _lie(lie, entry, axis, active and (x.dtype.is_floating_point or x.dtype.is_complex))
            for lie, entry, x in zip(lies, said, tensors, strict=True)
        ]
        at = len(option.inputs)
        share = option.share * (call.sizes[axis] if active else 1)
        yield Option(tuple(made[:at]), tuple(made[at:]), share)


def _lie(lie: Lie, entry: Sbp | Stripes | Seen, axis: int, addends: bool) -> Lie:
    """A lie with one more axis; what is whole there has gradients in addends, where ranks do different things."""
    state, grads = lie
    if isinstance(entry, Split | Stripes | Seen):
        dims, windows = list(state.dims), list(state.windows or [None] * len(state.dims))
        dims[entry.dim] = (-entry.count, axis) if isinstance(entry, Stripes) else (axis,)
        windows[entry.dim] = entry.window if isinstance(entry, Seen) else None
        return Lie(state._replace(dims=tuple(dims), windows=tuple(windows) if any(windows) else ()), grads)
    if entry is B:
        return Lie(state, tuple(sorted((*grads, axis))) if addends else grads)
    return Lie(state._replace(partial=tuple(sorted((*state.partial, axis)))), grads)


def fixed_way(call: Call, outputs: tuple[State, ...], axis: int) -> Way:
    """The way of the rule book on the other axes; `call.states` are those of all.

    Where nothing is split on the others a rank still may have to do something else than the op as it is called.
    """
    call = _without(call, axis)
    way = way_of(call, tuple(_dropped(state, axis) for state in outputs))
    if way.local is None:
        answer = answer_of(call)
        if isinstance(answer, Match):
            return replace(way, local=answer.local)
        same = (other for other in answer or () if (other.inputs, other.outputs) == (way.inputs, way.outputs))
        return next(same, way)
    return way


def _without(call: Call, axis: int) -> Call:
    sizes = tuple(1 if a == axis else n for a, n in enumerate(call.sizes))
    return replace(call, sizes=sizes, states=tuple(_dropped(state, axis) for state in call.states))


def _dropped(state: State, axis: int) -> State:
    dims = tuple(trim(tuple(f for f in factors if f != axis)) for factors in state.dims)
    partial = tuple(a for a in state.partial if a != axis)
    each = zip(state.dims, state.windows, strict=False)
    windows = tuple(None if axis in factors else window for factors, window in each)
    return State(dims, partial, state.reduction if partial else "sum", windows if any(windows) else ())
