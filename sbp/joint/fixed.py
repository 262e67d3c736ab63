"""Calls that a composite fixes on some axes: its signature holds there, and the rule book gives the options on the
others."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from ...placement.errors import SbpError
from ..call import Call, Match, Way
from ..logical import Fixed, LogicalOp, Seen, Stripes
from ..signature import B, Partial, Sbp, Split
from ..state import Factors, Lie, State, trim
from .options import Cut, Option, Reach, answer_of, options, way_of
from .pins import Entries, cuts_of

__all__ = ["asked_cuts", "fixed_options", "fixed_way", "options_of"]

FixedEntry: TypeAlias = Sbp | Stripes | Seen
FixedEntries: TypeAlias = tuple[tuple[int, FixedEntry], ...]  # of the axes of more than one rank, in their order


def options_of(
    op: LogicalOp, call: Call, reach: Sequence[Reach], grads: Sequence[bool], asked: Sequence[Collection[Cut]] = ()
) -> list[Option]:
    """Every option of an op, or those that a composite leaves of them; `asked` is how its results are wanted cut."""
    return (
        options(call, reach, grads, asked) if op.fixed is None else fixed_options(call, reach, grads, op.fixed, asked)
    )


def asked_cuts(
    ops: Sequence[LogicalOp], calls: Sequence[Call], pinned: Mapping[int, State | Entries]
) -> Iterator[tuple[int, Cut]]:
    """The cuts that composites ask of inputs, and pins of results, by number of value: those that nobody else would
    choose."""
    for index, (op, call) in enumerate(zip(ops, calls, strict=True)):
        for number, x, entries in zip(op.inputs, call.inputs, op.fixed.inputs if op.fixed else (), strict=False):
            said = dict(zip(op.fixed.round.axes if op.fixed else (), entries, strict=True))
            split = tuple(entry if isinstance(entry := said.get(a), Split) else None for a in range(len(call.sizes)))
            yield from ((number, cut) for cut in cuts_of(split, x, call.sizes))
        if index in pinned:
            yield from ((op.numbers[0], cut) for cut in cuts_of(pinned[index], call.outputs[0], call.sizes))


def fixed_options(
    call: Call, reach: Sequence[Reach], grads: Sequence[bool], fixed: Fixed, asked: Sequence[Collection[Cut]] = ()
) -> list[Option]:
    """Every option of a call. One that cuts a dim on another axis too, which the composite cuts, is none, unless it is
    nested: then pieces of these other axes are cut once more."""
    axes = frozenset(a for a in fixed.round.axes if call.sizes[a] > 1)
    if not axes:
        return options(call, reach, grads, asked)
    apart = [of._replace(states=tuple(state for state in of.states if axes.isdisjoint(state.split))) for of in reach]
    elsewhere = [[cut for cut in cuts if axes.isdisjoint(cut[1])] for cuts in asked]
    found = options(_without(call, axes), apart, grads, elsewhere)
    made = list(_on_axes(call, found, fixed, axes))
    if not made:
        raise SbpError(
            f"{call.name} cannot lie as its composite says: {_shown(fixed.inputs)} -> {_shown(fixed.outputs)}\n"
            "  every way that its rule knows cuts the same dims on other axes; write the composite for other dims"
        )
    return made


def _shown(entries: Sequence[Sequence[FixedEntry]]) -> str:
    return ", ".join(str(each[0]) if len(each) == 1 else f"({', '.join(map(str, each))})" for each in entries)


def _on_axes(call: Call, found: Sequence[Option], fixed: Fixed, axes: frozenset[int]) -> Iterator[Option]:
    said = [_said(fixed, each, axes) for each in (*fixed.inputs, *fixed.outputs)]
    active = frozenset(axis for each in said for axis, entry in each if entry is not B)
    tensors = (*call.inputs, *call.outputs)
    for option in found:
        lies = (*option.inputs, *option.outputs)
        if not all(_goes_with(lie.state, each, fixed.nested) for lie, each in zip(lies, said, strict=True)):
            continue
        made = [
            _lie(lie, each, active if x.dtype.is_floating_point or x.dtype.is_complex else frozenset())
            for lie, each, x in zip(lies, said, tensors, strict=True)
        ]
        at = len(option.inputs)
        share = option.share * prod(call.sizes[axis] for axis in active)
        yield Option(tuple(made[:at]), tuple(made[at:]), share)


def _said(fixed: Fixed, entries: Sequence[FixedEntry], axes: frozenset[int]) -> FixedEntries:
    pairs = zip(fixed.round.axes, entries, strict=True)
    return tuple(sorted((pair for pair in pairs if pair[0] in axes), key=lambda pair: pair[0]))


def _goes_with(state: State, said: FixedEntries, nested: bool) -> bool:
    """Whether the choice on the other axes leaves alone the dims that are cut here, or is one to cut further, and adds
    up in the same way."""
    apart = Stripes | Seen if nested else Split | Stripes | Seen
    cut = any(isinstance(entry, apart) and state.dims[entry.dim] for _, entry in said)
    kinds = {entry.reduction for _, entry in said if isinstance(entry, Partial)}
    return not cut and len(kinds | ({state.reduction} if state.partial else set())) < 2


def _lie(lie: Lie, said: FixedEntries, active: frozenset[int]) -> Lie:
    """A lie with more axes. A value that is whole on one has its gradient in addends, if ranks do different things."""
    dims: list[Factors] = list(lie.state.dims)
    windows = list(lie.state.windows or [None] * len(dims))
    partial, grads, reduction = list(lie.state.partial), list(lie.grads), lie.state.reduction
    for axis, entry in said:
        if isinstance(entry, Split | Stripes | Seen):
            dims[entry.dim] += (-entry.count, axis) if isinstance(entry, Stripes) else (axis,)
            windows[entry.dim] = entry.window if isinstance(entry, Seen) else None
        elif isinstance(entry, Partial):
            partial.append(axis)
            reduction = entry.reduction
        elif axis in active:
            grads.append(axis)
    state = State(tuple(dims), tuple(sorted(partial)), reduction, tuple(windows) if any(windows) else ())
    return Lie(state, tuple(sorted(grads)))


def fixed_way(call: Call, outputs: tuple[State, ...], axes: Sequence[int]) -> Way:
    """The way of the rule book on the other axes; `call.states` are those of all.

    Where nothing is split on the others a rank still may have to do something else than the op as it is called.
    """
    gone = frozenset(axes)
    call = _without(call, gone)
    way = way_of(call, tuple(_dropped(state, gone) for state in outputs))
    if way.local is None:
        answer = answer_of(call)
        if isinstance(answer, Match):
            return replace(way, local=answer.local)
        same = (other for other in answer or () if (other.inputs, other.outputs) == (way.inputs, way.outputs))
        return next(same, way)
    return way


def _without(call: Call, axes: frozenset[int]) -> Call:
    sizes = tuple(1 if a in axes else n for a, n in enumerate(call.sizes))
    return replace(call, sizes=sizes, states=tuple(_dropped(state, axes) for state in call.states))


def _dropped(state: State, axes: frozenset[int]) -> State:
    dims = tuple(trim(tuple(f for f in factors if f not in axes)) for factors in state.dims)
    partial = tuple(a for a in state.partial if a not in axes)
    each = zip(state.dims, state.windows, strict=False)
    windows = tuple(None if axes.intersection(factors) else window for factors, window in each)
    return State(dims, partial, state.reduction if partial else "sum", windows if any(windows) else ())
