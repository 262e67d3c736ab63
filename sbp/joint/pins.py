"""Pins: values that a program says how they lie, on all axes of a placement or on some, the others being free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import PlacementError, SbpError
from ..call import Call
from ..logical import Logical, LogicalOp
from ..signature import B, Sbp, Split
from ..state import Factors, Lie, State, state_of, trim
from ..text import Pin
from .options import Cut, Option, fits

__all__ = ["Entries", "allows", "cut_over", "cuts_of", "is_pin_alone", "pinned", "pins_by_op", "stated"]

Entries: TypeAlias = tuple[Sbp | None, ...]  # one for each axis of a placement; None: free


def pins_by_op(logical: Logical, ops: Sequence[Placement]) -> Mapping[int, State | Entries]:
    """The states or entries that were said of results of ops, where these ops run; by their place in the graph."""
    found: dict[int, State | Entries] = {}
    for at, (op, there) in enumerate(zip(logical.ops, ops, strict=True)):
        if isinstance(op.lies, State):
            found[at] = op.lies
        elif op.lies is not None:
            try:
                found[at] = op.lies.on(there, op.outputs[0].ndim)
            except (PlacementError, SbpError) as error:
                raise type(error)(f"{op.lies.what} is to flow as {op.lies}\n  {error}") from None
    return found


def is_pin_alone(op: LogicalOp) -> bool:
    """Whether an op is there for its pin alone, so that no rank has anything to compute."""
    return op.op is torch.ops.aten.alias.default


def allows(said: State | Entries, state: State) -> bool:
    """Whether a state is what was said, or one of its kind, because a signature does not say how dims are cut."""
    if isinstance(said, State):
        return state == said
    lying = state.sbp(len(said))
    return all(entry is None or entry is lying[axis] for axis, entry in enumerate(said))


def cuts_of(said: State | Entries, of: Tensor, sizes: tuple[int, ...]) -> Iterator[Cut]:
    """The cuts that were said of a value and that nobody would choose, because their pieces differ by much."""
    dims = said.dims if isinstance(said, State) else stated(said, of.ndim, sizes).dims
    for d, factors in enumerate(dims):
        if factors and all(f >= 0 for f in factors) and not fits(of.shape[d], [sizes[f] for f in factors]):
            yield d, factors


def cut_over(said: State | Entries | None, axis: int) -> bool:
    """Whether the words cut a value over an axis."""
    if said is None or isinstance(said, State):
        return said is not None and axis in said.split
    return isinstance(said[axis], Split)


def stated(said: Entries, ndim: int, sizes: tuple[int, ...]) -> State:
    """The plain state that was said, with what is free as B."""
    return state_of(tuple(B if entry is None else entry for entry in said), ndim, sizes)


def pinned(found: Sequence[Option], said: State | Entries, call: Call, op: LogicalOp) -> list[Option]:
    """The options whose result lies as it is to.

    A call without inputs can make its result in any layout, and one that only passes its input on may lie in pieces
    that nobody would choose. Every other call has to have such an option, or this is an error."""
    if not isinstance(said, State):
        said = tuple(None if n == 1 else entry for entry, n in zip(said, call.sizes, strict=True))
    fits = [option for option in found if allows(said, option.outputs[0].state)]
    if fits:
        return fits
    if not call.inputs:
        ndim = call.outputs[0].ndim
        return [Option((), (Lie(said if isinstance(said, State) else stated(said, ndim, call.sizes)),), 1)]
    if len(call.inputs) > 1 or call.name not in ("alias", "clone"):
        raise _none_fits(found, said, call, op)
    lies = dict.fromkeys(_laid(option.outputs[0], said) for option in found)
    return [Option((lie,), (lie,), 1) for lie in lies]


def _none_fits(found: Sequence[Option], said: State | Entries, call: Call, op: LogicalOp) -> SbpError:
    """No way to compute this gives what was said: another would be taken without a word."""
    ndim = len(call.sizes)
    signature = said.sbp(ndim) if isinstance(said, State) else said
    asked = ", ".join("any" if entry is None else str(entry) for entry in signature)
    ways = dict.fromkeys(f"({', '.join(map(str, option.outputs[0].state.sbp(ndim)))})" for option in found)
    what = op.lies.what if isinstance(op.lies, Pin) and op.lies.what else "a value"
    where = f", called in {op.origin.module or 'the graph'}, at {op.origin.line or 'no line'}"
    return SbpError(
        f"{what} is to lie as ({asked}), and {call.name} of {', '.join(str(tuple(x.shape)) for x in call.inputs)} "
        f"cannot give that{where}\n  it gives {', '.join(ways)}\n"
        "  say so of a copy of it, which may lie in any way: axis.call(torch.ops.aten.alias.default, y, lies=...) in a "
        "composite, y.to_global(sbp=...) in a model"
    )


def _laid(lie: Lie, said: State | Entries) -> Lie:
    """A value's lie with the entries that were said in the place of its own."""
    if isinstance(said, State):
        return Lie(said, tuple(a for a in lie.grads if a not in said.split and a not in said.partial))
    about = {axis for axis, entry in enumerate(said) if entry is not None}
    dims: list[Factors] = [trim(tuple(f for f in factors if f not in about)) for factors in lie.state.dims]
    for axis, entry in enumerate(said):
        if isinstance(entry, Split):
            dims[entry.dim] = tuple(sorted((*(f for f in dims[entry.dim] if f >= 0), axis)))
    partial = tuple(a for a in lie.state.partial if a not in about)
    state = State(tuple(dims), partial, lie.state.reduction)
    return Lie(state, tuple(a for a in lie.grads if a not in state.split))
