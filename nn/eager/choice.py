"""The choice for a captured call: the ways that its rule gives, what each costs, and why there may be none."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...placement import Placement, default_cluster
from ...placement.links import Links
from ...sbp import Layout
from ...sbp.call import Call, Way, numbered
from ...sbp.choose import PriceOf, candidates, choose
from ...sbp.joint.move_cost import each_moved, seen_seconds
from ...sbp.layout import memory_gaps, memory_order
from ...sbp.logical import Logical, LogicalOp
from ...sbp.precision import adds_up, promotes, rounded
from ...sbp.registry import find, has_rule
from ...sbp.state import Lie, State, local_numel
from ...sbp.traits import traits
from ..tensors.handle import has_grad
from ..tensors.tensor import GlobalTensor
from .capture import capture
from .formulas import composite
from .recipe import Recipe

__all__ = ["Verdict", "cast_first", "lies", "options", "prices", "statistics", "verdict"]


@dataclass(frozen=True, eq=False)
class Verdict:
    """The answer to a call, before anything is built for it.

    By a `formula`, under one of several `ways`, taken `apart`, or, for want of all these, gathered: then `why` says it.
    """

    op: LogicalOp
    call: Call
    formula: Recipe | None = None
    ways: Sequence[Way] = ()
    costs: Sequence[float] = ()
    way: Way | None = None
    apart: Logical | None = None
    why: str = ""


def verdict(seen: Logical, tensors: Sequence[GlobalTensor]) -> Verdict:
    """The verdict on a function of these tensors that was captured as one op."""
    where = tensors[0].placement
    (op,) = seen.ops
    call = seen.call(op, tuple([x._layout.state for x in tensors]), where.shape)
    formula = composite(call, op)
    if formula is not None:
        return Verdict(op, call, formula)
    ways, why = _allowed(call, op, tensors)
    if ways:
        way, costs = choose(call, ways, prices(tensors, where, ways))
        return Verdict(op, call, ways=ways, costs=costs, way=way)
    if (
        call.op._can_decompose()
        and not call.op._schema.is_mutable
        and "kept" not in traits(call.name)
        and not statistics(call)
    ):
        named = numbered((call.args, call.kwargs))
        try:
            apart = capture(call.op.decompose, named[0], named[1], [x._layout for x in tensors], grad=True)
        except Exception:
            return Verdict(op, call, why=why)
        return Verdict(op, call, apart=apart, why=why)
    return Verdict(op, call, why=why)


def _allowed(call: Call, op: LogicalOp, tensors: Sequence[GlobalTensor]) -> tuple[Sequence[Way], str]:
    """The ways that may be taken or, where there are none, why."""
    if _draws(call.op):
        return [], "it draws random numbers, and these must be the same on all ranks"
    if _reshapes(op, tensors):
        return [], "it changes the shape of what it writes to"
    ways = options(call)
    if not ways:
        return [], "no rule" if not has_rule(call.op) else "its rule has nothing to say of these arguments"
    if call.op._schema.is_mutable:
        return _in_place(call, op, ways), "what it writes to cannot stay where it is"
    kept = statistics(call)
    ways = [way for way in ways if all(way.inputs[i] == call.states[i] for i in kept)]
    return ways, "the statistics that it writes to cannot stay where they are"


def _draws(op: torch._ops.OpOverload) -> bool:
    """Whether an op draws random numbers, and only the rule of all pointwise ops would cover it: ranks must agree."""
    return torch.Tag.nondeterministic_seeded in op.tags and not has_rule(op)


def _reshapes(op: LogicalOp, tensors: Sequence[GlobalTensor]) -> bool:
    """Whether an op changes the shape of what it writes to, so that the fake no longer shows what went in."""
    return any(
        n < len(tensors) and tuple(y.shape) != tensors[n]._layout.shape
        for n, y in zip(op.numbers, op.outputs, strict=True)
    )


def options(call: Call) -> list[Way]:
    """The ways that the rule book gives; none where it has nothing to say."""
    try:
        answer = find(call)
    except (AssertionError, IndexError, KeyError):  # arguments that do not fit; torch says it better
        return []
    return [] if answer is None else candidates(call, answer)


def statistics(call: Call) -> list[int]:
    """Inputs that normalisations write to although their schema does not say so."""
    if not (call.bound.get("training") or call.bound.get("use_input_stats")):
        return []
    held = [call.bound.get(name) for name in ("running_mean", "running_var")]
    return [i for i, x in enumerate(call.inputs) if any(x is one for one in held)]


def _in_place(call: Call, op: LogicalOp, ways: Sequence[Way]) -> list[Way]:
    """Those in which what is written to may stay where it is."""
    written = [i for i in range(len(call.inputs)) if i in op.numbers]
    if len(written) != len(op.numbers):
        return []
    return [
        way
        for way in ways
        if all(way.inputs[i] == call.states[i] for i in written)
        and all(way.outputs[k] == call.states[i] for k, i in enumerate(op.numbers))
    ]


def prices(tensors: Sequence[GlobalTensor], where: Placement, ways: Sequence[Way]) -> PriceOf:
    """Seconds of bringing an input into its state in one of these ways, and its gradient back; all at once."""
    known = {(i, x._layout.state): (0.0, 0.0) for i, x in enumerate(tensors)}
    learns = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
    wanted = dict.fromkeys(pair for way in ways for pair in enumerate(way.inputs))
    pairs = [pair for pair in wanted if pair not in known]
    moves: list[tuple[State, State, float]] = []
    for i, to in pairs:
        of, itemsize = tensors[i]._layout, tensors[i]._layout.dtype.itemsize
        moves.append((of.state, to, local_numel(of.state.dims, of.shape, where.shape) * itemsize))
        if learns[i]:
            held = local_numel(to.dims, of.shape, where.shape) * itemsize
            moves.append((_gradient(to, of), of.dual.state, held))
        else:
            moves.append((to, to, 0))
    if moves:
        links = Links.of(where, default_cluster(where))
        seconds = each_moved(moves, links).tolist()
        for at, (i, to) in enumerate(pairs):
            if to.windows:
                of = tensors[i]._layout
                halo = seen_seconds(of.state, to, of.shape, of.dtype.itemsize, links)
                seconds[2 * at] += halo
                seconds[2 * at + 1] += halo * learns[i]
        known.update(zip(pairs, zip(seconds[::2], seconds[1::2], strict=True), strict=True))
    return lambda i, state: known[i, state]


def _gradient(to: State, of: Layout) -> State:
    """The gradient's state after a move, as far as one input tells: B stays as it was, P becomes B."""
    still = tuple(a for a in of.dual.state.partial if a not in to.split and a not in to.partial)
    return Lie(to, still).dual.state


def lies(way: Way, found: Verdict, tensors: Sequence[GlobalTensor]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """The layouts of inputs and outputs under a way, and with them of their gradients."""
    where, op, call = tensors[0].placement, found.op, found.call
    # The axes on which ranks hold different things.
    active = {a for state in way.inputs + way.outputs for a in (*state.split, *state.partial)}
    free = [a for a in range(where.ndim) if where.shape[a] > 1 and a not in active]
    written = [tensors[n] for n in op.numbers if n < len(tensors)] if call.op._schema.is_mutable else []
    floats = written or [x for x in tensors if has_grad(x._layout)]  # what is written to keeps its gradient's way
    flexible = {a for a in free if floats and all(a in x._layout.grad_partial for x in floats)}
    if not written and not adds_up(call.op, call.inputs, call.outputs):
        flexible = set()

    def grads(state: State, dtype: torch.dtype) -> tuple[int, ...]:
        if not (dtype.is_floating_point or dtype.is_complex):
            return ()
        kept = [a for a in range(where.ndim) if where.shape[a] > 1 and a not in state.split and a not in state.partial]
        return tuple(a for a in kept if a in active or a in flexible)

    targets = tuple(
        _same_or(x._layout, Layout(where, state, x._layout.shape, x.dtype, grads(state, x.dtype)))
        for x, state in zip(tensors, way.inputs, strict=True)
    )
    outs = tuple(
        Layout(where, state, tuple(y.shape), y.dtype, grads(state, y.dtype), None, memory_order(y), memory_gaps(y))
        for y, state in zip(call.outputs, way.outputs, strict=True)
    )
    return targets, outs


def cast_first(call: Call, targets: Sequence[Layout]) -> tuple[int, ...]:
    """The inputs that are cast to the dtype of what comes out before the call, which would else round addends.

    A bfloat16 `B` times float32 rows has a float32 gradient, of which each rank has an addend.
    """
    if not promotes(call.op):
        return ()
    return tuple(i for i in rounded(call.inputs, call.outputs) if targets[i].grad_partial)


def _same_or(have: Layout, to: Layout) -> Layout:
    """The layout a tensor has where it differs only in how it is written."""
    return have if have.state == to.state and have.grad_partial == to.grad_partial else to
