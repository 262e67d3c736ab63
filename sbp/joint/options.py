"""Options: every way in which a call may run on a placement, however its inputs lie now.

On one axis of the grid a call splits one factor, or carries addends of one linear group, or does nothing: then every
rank does the same, and gradients come back whole, or as addends where they arrive as such. An option is one choice for
each axis. The states that reach the call and its consumers' wishes decide how a factor is cut, and so where holes come
in: heads of a packed qkv weight are cut in three first.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from ...placement.errors import SbpError
from ..book.filling import of_a_piece
from ..call import NEVER, Call, Match, Way
from ..choose import AxisUse, everywhere, way_by
from ..precision import adds_up, promotes, rounded
from ..registry import find, has_rule
from ..state import Factors, Lie, State
from ..traits import traits

__all__ = ["Cut", "Option", "Reach", "answer_of", "fits", "options", "source_states", "way_of"]


Cut: TypeAlias = tuple[int, Factors]  # a dim, and the axes that cut it
NOTHING, SAME = ("nothing", 0), ("same", 0)  # gradients whole; gradients as addends


class Option(NamedTuple):
    """The layouts of a call's inputs and outputs, and the number of ranks that share its work."""

    inputs: tuple[Lie, ...]
    outputs: tuple[Lie, ...]
    share: int


class Reach(NamedTuple):
    """An input before anything is chosen: its possible states without addends, whether it may come as addends, and
    whether gradients flow back."""

    states: Collection[State]
    partial: bool
    grad: bool


def answer_of(call: Call) -> Match | Sequence[Way] | None:
    """The rule book's answer for a call; None also where its arguments do not fit the rule.

    Random numbers of the shape of a tensor may be wanted in any pieces: they are drawn whole, as on one device.
    """
    if torch.Tag.nondeterministic_seeded in call.op.tags and not has_rule(call.op):
        if "follows" not in traits(call.name):
            return None
        state = call.states[0] if call.states else State(((),) * call.inputs[0].ndim)
        return [Way((state,), (State(state.dims),))]
    if not isinstance(call.op, torch._ops.OpOverload) and not has_rule(call.op):
        return call.op.answer(call)
    try:
        return find(call)
    except (AssertionError, IndexError, KeyError):
        return None


def options(
    call: Call, reach: Sequence[Reach], outputs_grad: Sequence[bool], asked: Sequence[Collection[Cut]] = ()
) -> list[Option]:
    """Every option of a call on a grid of `call.sizes`, in an order that depends on nothing else.

    A dim is cut into pieces that differ by much only where an input comes so already, or where that is `asked` of an
    output."""
    answer = answer_of(replace(call, states=_whole(call)))
    found: dict[tuple[tuple[Lie, ...], tuple[Lie, ...]], int] = {}

    narrow = [i for i in rounded(call.inputs, call.outputs) if reach[i].grad] if promotes(call.op) else []

    def add(way: Way, same: frozenset[int]) -> None:
        inputs, outputs, share = _lies(call, way, same)
        if not any(inputs[i].grads for i in narrow):
            found.setdefault((inputs, outputs), share)

    for way in _filled(call, [of.states for of in reach], asked):
        add(way, frozenset())
    grads = any(outputs_grad) and adds_up(call.op, call.inputs, call.outputs)
    for match in _matches(answer):
        for way, same in _of_match(call, match, reach, grads, asked):
            add(way, same)
    for way, same in _of_states(call, reach, grads, isinstance(answer, Match)):
        add(way, same)
    if not found:
        add(everywhere(call), frozenset())
        if grads:
            for count in range(1, len(_axes(call)) + 1):
                for axes in combinations(_axes(call), count):
                    add(everywhere(call), frozenset(axes))
    return [Option(*lies, share) for lies, share in found.items()]


def way_of(call: Call, outputs: tuple[State, ...]) -> Way:
    """The way of the rule book in which inputs lie as `call.states` says and outputs so."""
    plain = everywhere(call)
    if call.states == plain.inputs and outputs == plain.outputs:
        return plain
    answer = answer_of(call)
    ways: list[Way] = []
    for match in _matches(answer):
        ways += match.also
        for doing in product(*(_held(call, match, outputs, axis) for axis in range(len(call.sizes)))):
            orders = _orders_held(call, match, outputs, doing)
            if orders is not None:
                way = way_by(call, match, doing, lambda f, axes, known=orders: known[f])  # type: ignore[misc]
                ways += [way] if way else []
    if answer is not None and not isinstance(answer, Match):
        ways += answer
    for way in (*ways, *_filled(call, [(state,) for state in call.states])):
        if way.inputs == call.states and way.outputs == outputs:
            return way
    raise SbpError(
        f"{call.name} has no rule for inputs {', '.join(str(s.dims) for s in call.states)} "
        f"and outputs {', '.join(str(s.dims) for s in outputs)}\n  flow.check_rule({call.name!r}, ...) tells more"
    )


def source_states(
    shape: tuple[int, ...], sizes: tuple[int, ...], wished: Collection[tuple[int, Factors]]
) -> list[State]:
    """The states in which a tensor that comes from outside may lie: each axis splits a dim, perhaps as wished, or none.

    Uneven pieces only where they differ by little.
    """
    axes = [a for a, n in enumerate(sizes) if n > 1]
    found: dict[State, None] = {}
    for dims in product(*[[None, *range(len(shape))]] * len(axes)):
        held = {d: tuple(a for a, on in zip(axes, dims, strict=True) if on == d) for d in range(len(shape))}
        if not all(fits(n, [sizes[a] for a in held[d]]) or (d, held[d]) in wished for d, n in enumerate(shape)):
            continue
        ways = [[held[d], *_wished(wished, d, held[d])] for d in range(len(shape))]
        for cut in product(*ways):
            found[State(tuple(cut))] = None
    return list(found)


def _wished(wished: Collection[tuple[int, Factors]], dim: int, axes: tuple[int, ...]) -> list[Factors]:
    return sorted(f for d, f in wished if d == dim and axes and tuple(a for a in f if a >= 0) == axes)


def fits(size: int, ranks: Sequence[int]) -> bool:
    """Whether a dim may be cut by so many ranks: evenly, or into pieces that differ by a quarter at most."""
    parts = prod(ranks)
    return parts == 1 or (size % parts == 0 and size > 0) or size >= 4 * parts


def _filled(call: Call, states: Sequence[Collection[State]], asked: Sequence[Collection[Cut]] = ()) -> Iterator[Way]:
    """The ways in which ranks make their pieces alone of what has one value everywhere: pieces like those of a tensor
    that it is made after, else any. Where that takes as long as the whole it takes less memory, so that it comes
    first."""
    if "filled" not in traits(call.name):
        return
    shape, local = tuple(call.outputs[0].shape), of_a_piece(call.op)
    if not call.inputs:
        for state in reversed(source_states(shape, call.sizes, asked[0] if asked else ())):
            yield Way((), (state,), local)
        return
    after = tuple(call.inputs[0].shape)
    for state in (state for each in states for state in each if not (state.partial or state.windows)):
        pairs = zip(state.dims, after, shape, strict=False)
        dims = [factors if n == size else () for factors, n, size in pairs]
        yield Way((state,), (State((*dims, *[()] * (len(shape) - len(dims)))),), local)


def _axes(call: Call) -> list[int]:
    return [a for a, n in enumerate(call.sizes) if n > 1]


def _matches(answer: Match | Sequence[Way] | None) -> list[Match]:
    """A match, and what holds besides for ranks that ask no neighbours."""
    if not isinstance(answer, Match):
        return []
    return [answer] if answer.alone is None else [answer, answer.alone]


def _whole(call: Call) -> tuple[State, ...]:
    return tuple(State(((),) * x.ndim) for x in call.inputs)


def _of_match(
    call: Call, match: Match, reach: Sequence[Reach], grads: bool, asked: Sequence[Collection[Cut]]
) -> Iterator[tuple[Way, frozenset[int]]]:
    per_axis: list[list[AxisUse]] = []
    ragged = _ragged(call, match, reach, asked)
    for axis, n in enumerate(call.sizes):
        if n == 1:
            per_axis.append([NOTHING])
            continue
        splits: list[AxisUse] = [
            ("split", f)
            for f, size in enumerate(match.sizes)
            if fits(size, [n]) or (ragged and any(f == g and axis in axes for g, axes in ragged))
        ]
        groups: list[AxisUse] = [
            ("linear", g) for g, group in enumerate(match.linear) if all(reach[i].partial for i in group)
        ]
        per_axis.append([*splits, *groups, NOTHING, *([SAME] if grads else [])])
    known = _cuts(call, match, reach)
    for doing in product(*per_axis):
        axes_of: dict[int, tuple[int, ...]] = {}
        for axis, (what, f) in enumerate(doing):
            if what == "split":
                axes_of[f] = (*axes_of.get(f, ()), axis)
        each = axes_of.items()
        if not all(fits(match.sizes[f], [call.sizes[a] for a in axes]) or (f, axes) in ragged for f, axes in each):
            continue
        same = frozenset(axis for axis, what in enumerate(doing) if what == SAME)
        quiet = [NOTHING if what == SAME else what for what in doing]
        ways = [[axes, *known.get((f, frozenset(axes)), ())] for f, axes in axes_of.items()]
        for cut in product(*ways):
            orders = dict(zip(axes_of, cut, strict=True))
            way = way_by(call, match, quiet, lambda f, axes, orders=orders: orders[f])  # type: ignore[misc]
            if way is not None:
                yield way, same


def _ragged(
    call: Call, match: Match, reach: Sequence[Reach], asked: Sequence[Collection[Cut]]
) -> frozenset[tuple[int, Factors]]:
    """Factors that come in, or are asked of outputs, in pieces which nobody would choose, each with the axes that cut
    it. Where a rank would have nothing, only rules that say that it may."""
    seen = {f for _, f in match.windows}
    cuts = {
        (f, factors)
        for dims, of in zip(match.inputs, reach, strict=True)
        for state in of.states
        for f, factors in zip(dims, state.dims, strict=True)
    } | {(dims[d], factors) for dims, of in zip(match.outputs, asked, strict=False) for d, factors in of}

    def counts(f: int, factors: Factors) -> bool:
        if f == NEVER or f in seen or any(a < 0 for a in factors):
            return False
        size, ranks = match.sizes[f], [call.sizes[a] for a in factors]
        return not fits(size, ranks) and (match.hollow or size >= prod(ranks))

    return frozenset(cut for cut in cuts if counts(*cut))


def _cuts(call: Call, match: Match, reach: Sequence[Reach]) -> dict[tuple[int, frozenset[int]], list[Factors]]:
    """The cuts of factors in another than the plain order in states that may come in, by factor and axes."""
    found: dict[tuple[int, frozenset[int]], dict[Factors, None]] = {}
    for dims, of in zip(match.inputs, reach, strict=True):
        for state in of.states:
            for f, factors in zip(dims, state.dims, strict=True):
                hollow = f != NEVER and any(a < 0 for a in factors)
                if hollow and match.may_have_holes(f, factors, call.sizes):
                    found.setdefault((f, frozenset(a for a in factors if a >= 0)), {})[factors] = None
    return {key: sorted(cuts) for key, cuts in found.items()}


def _of_states(call: Call, reach: Sequence[Reach], grads: bool, holes: bool) -> Iterator[tuple[Way, frozenset[int]]]:
    """The options of rules that map states, for each state that may come in, and for those with addends besides.

    A rule that is a match may have more to say of states with holes.
    """
    axes = _axes(call)
    if len(call.inputs) != 1:
        return
    for state in reach[0].states:
        if holes and all(f >= 0 for factors in state.dims for f in factors):
            continue
        free = [a for a in axes if a not in state.split]
        base: Way | None = _exact(call, state)
        if base is None:
            continue
        for kinds in product(*[[0, *([1] if grads else []), *([2] if reach[0].partial else [])]] * len(free)):
            partial = tuple(a for a, kind in zip(free, kinds, strict=True) if kind == 2)
            found = _exact(call, state._replace(partial=partial)) if partial else base
            if found:
                yield found, frozenset(a for a, kind in zip(free, kinds, strict=True) if kind == 1)


def _exact(call: Call, state: State) -> Way | None:
    """The way in which the input stays in this state, or else one in which ranks take besides what they see."""
    answer = answer_of(replace(call, states=(state,)))
    ways: Sequence[Way] = answer.also if isinstance(answer, Match) else answer or ()
    stays = (way for way in ways if way.inputs == (state,))
    return next(stays, next((way for way in ways if way.inputs[0].plain == state), None))


def _lies(call: Call, way: Way, same: frozenset[int]) -> tuple[tuple[Lie, ...], tuple[Lie, ...], int]:
    """A way's inputs and outputs with their gradients, which are addends where ranks do different things, or over
    `same`; and the number of ranks that share the work."""
    states = way.inputs + way.outputs
    split = {a for state in states for a in state.split}
    active = {a for state in states for a in state.partial} | split | same

    def lie(state: State, is_float: bool) -> Lie:
        if not is_float:
            return Lie(state)
        return Lie(state, tuple(sorted(a for a in active if a not in state.split and a not in state.partial)))

    def floats(x: object) -> bool:
        return bool(x.dtype.is_floating_point or x.dtype.is_complex)  # type: ignore[attr-defined]

    inputs = tuple(lie(state, floats(x)) for state, x in zip(way.inputs, call.inputs, strict=True))
    outputs = tuple(lie(state, floats(y)) for state, y in zip(way.outputs, call.outputs, strict=True))
    return inputs, outputs, prod(call.sizes[a] for a in split)


def _held(call: Call, match: Match, outputs: tuple[State, ...], axis: int) -> list[AxisUse]:
    """The role of an axis in a call whose inputs and outputs lie so."""
    for tensors, states in ((match.inputs, call.states), (match.outputs, outputs)):
        for dims, state in zip(tensors, states, strict=True):
            for f, factors in zip(dims, state.dims, strict=True):
                if axis in factors and f != NEVER:
                    return [("split", f)]
    partial = {i for i, state in enumerate(call.states) if axis in state.partial}
    groups: list[AxisUse] = [("linear", g) for g, group in enumerate(match.linear) if partial and set(group) >= partial]
    return [*groups, NOTHING]


def _orders_held(
    call: Call, match: Match, outputs: tuple[State, ...], doing: Sequence[AxisUse]
) -> Mapping[int, Factors] | None:
    orders: dict[int, Factors] = {}
    for tensors, states in ((match.inputs, call.states), (match.outputs, outputs)):
        for dims, state in zip(tensors, states, strict=True):
            for f, factors in zip(dims, state.dims, strict=True):
                if f != NEVER and any(a >= 0 for a in factors):
                    orders.setdefault(f, factors)
    return orders if all(f in orders for what, f in doing if what == "split") else None
