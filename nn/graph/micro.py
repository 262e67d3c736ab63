"""Micro-batches: what of a captured step is a part of the whole batch's, and how parts make the whole again.

    split     a piece along a dim: pieces are put behind each other
    avg, sum  an addend, with the micro-batch's share as its weight or as it is: losses and what follows linearly
    whole     the same in every micro-batch

The rule book tells, on one axis along which each sample is a rank's. Where an op needs a sum over all micro-batches, as
a mean does that ignores some labels, and it depends on inputs alone, it becomes an input itself, a *total*, which is
known before the step begins; so a loss is exactly that of the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ...placement.errors import SbpError
from ...sbp.call import NEVER, Call, Match, Ref, fill, refs_in
from ...sbp.joint.ways import answer_of
from ...sbp.logical import Logical, LogicalOp, Source
from ...sbp.state import State
from .expand import expand

MEAN = 1  # as ATen numbers reductions

__all__ = ["Micro", "Part", "Total", "separated"]


class Part(NamedTuple):
    """What a value of a micro-batch is of the batch's. `state` is on the axis of samples."""

    state: State
    avg: bool = False

    @property
    def dim(self) -> int | None:
        """The dim along which it is a piece, if it is one in a row."""
        return next((d for d, factors in enumerate(self.state.dims) if factors == (0,)), None)

    @property
    def whole(self) -> bool:
        return not self.state.split and not self.state.partial

    def __str__(self) -> str:
        if self.whole:
            return "whole"
        if self.state.partial:
            return "avg" if self.avg else self.state.reduction
        return f"split along {self.dim}"


class Total(NamedTuple):
    """A sum over all micro-batches: `graph` makes one addend of a micro-batch's inputs."""

    name: str
    graph: Logical


@dataclass(frozen=True, eq=False)
class Micro:
    """A step of one micro-batch; `parts` says of every value what part of the batch's it is."""

    logical: Logical
    totals: tuple[Total, ...]
    parts: Mapping[int, Part]


def separated(logical: Logical, batched: Mapping[str, int], samples: int) -> Micro:
    """The step of a micro-batch of so many samples; `batched` says along which dim an input has them."""
    logical = expand(logical, lambda op: 2)
    made = _Separator(logical, batched, samples)
    for op in logical.ops:
        made.put(op)
    return made.done()


class _Separator:
    def __init__(self, logical: Logical, batched: Mapping[str, int], samples: int) -> None:
        self.logical, self.samples = logical, samples
        self.parts: dict[int, Part] = {}
        self.given: set[int] = set()  # values that depend on inputs alone
        for n, source in enumerate(logical.sources):
            dims: list[tuple[int, ...]] = [()] * source.fake.ndim
            if source.kind == "input" and source.name in batched:
                dims[batched[source.name]] = (0,)
            self.parts[n] = Part(State(tuple(dims)))
            if source.kind in ("input", "constant") and not source.requires_grad:
                self.given.add(n)
        self.ops: list[LogicalOp] = []
        self.totals: dict[int, int] = {}  # value -> the number of its total, below 0 until all are known

    def put(self, op: LogicalOp) -> None:
        """One op more, with totals in the place of the sums that it cannot go on with."""
        found = self.of(op)
        if found is None:
            needed = [n for n in op.inputs if self.parts[n].state.partial and n in self.given]
            totals = {n: Ref(self.totals.setdefault(n, -1 - len(self.totals))) for n in needed}
            for n, ref in totals.items():
                self.parts[ref.number] = Part(State(((),) * len(self.parts[n].state.dims)))
                self.given.add(ref.number)
            op = replace(op, args=_put(op.args, totals), kwargs=_put(dict(op.kwargs), totals))
            found = self.of(op) if totals else None
        if found is None:
            found = self.unknown(op)
        self.ops.append(op)
        self.parts.update(zip(op.numbers, found, strict=True))
        if op.inputs and all(n in self.given for n in op.inputs):
            self.given.update(op.numbers)

    def call(self, op: LogicalOp) -> Call:
        by = {-1 - at: n for at, n in enumerate(self.totals)}
        fakes = {n: self.logical.fakes[by.get(n, n)] for n in op.inputs}
        states = tuple(self.parts[n].state for n in op.inputs)
        return Call(op.op, fill(op.args, fakes), fill(op.kwargs, fakes), op.outputs, states, (self.samples,))

    def of(self, op: LogicalOp) -> list[Part] | None:
        """What an op makes of such parts; None where that takes more than one micro-batch."""
        parts = [self.parts[n] for n in op.inputs]
        if all(part.whole for part in parts):
            return [Part(State(((),) * y.ndim)) for y in op.outputs]
        call = self.call(op)
        answer = answer_of(call)
        if isinstance(answer, Match):
            cut = any(part.state.split for part in parts)
            made = _split(call, answer, parts) if cut else _linear(answer, parts, op.outputs)
            if made is not None:
                return made
        ways: Sequence[Any] = answer.also if isinstance(answer, Match) else answer or ()
        for way in ways:
            if way.inputs == call.states:
                return [Part(state, any(p.avg for p in parts)) for state in way.outputs]
        return None

    def unknown(self, op: LogicalOp) -> list[Part]:
        """An op that cannot be done for a micro-batch alone."""
        lies = ", ".join(str(self.parts[n]) for n in op.inputs)
        raise SbpError(
            f"{Call(op.op, (), {}, ()).name} at {op.origin.line or 'no line'} needs more than one micro-batch at once\n"
            f"  its inputs are of the batch: {lies}\n"
            "  leave micro_batches= out, or write it so that samples do not depend on each other and the loss is a "
            "sum or a mean over them"
        )

    def done(self) -> Micro:
        logical, count = self.logical, len(self.totals)
        first = len(logical.sources)
        number = {n: n if n < first else n + count for n in logical.fakes}
        number.update({low: first + at for at, low in enumerate(self.totals.values())})
        refs = {n: Ref(m) for n, m in number.items()}
        ops = tuple(
            replace(
                op,
                args=_put(op.args, refs),
                kwargs=_put(dict(op.kwargs), refs),
                numbers=tuple(number[n] for n in op.numbers),
            )
            for op in self.ops
        )
        sources = tuple(Source(f"total {at}", "input", logical.fakes[n]) for at, n in enumerate(self.totals))
        losses = tuple(
            replace(
                loss,
                number=number[loss.number],
                gradient=None if loss.gradient is None else number[loss.gradient],
            )
            for loss in logical.losses
        )
        made = replace(
            logical,
            sources=(*logical.sources, *sources),
            ops=ops,
            result=_put(logical.result, refs),
            losses=losses,
            writes={name: number[n] for name, n in logical.writes.items()},
        )
        parts = {number[n]: part for n, part in self.parts.items()}
        totals = tuple(Total(f"total {at}", _alone(made, number[n])) for at, n in enumerate(self.totals))
        return Micro(_without_unused(made), totals, parts)


def _split(call: Call, match: Match, parts: Sequence[Part]) -> list[Part] | None:
    """One factor split: that of the samples. The op itself runs, and not what ranks would run in its place, so it must
    be one that does the same."""
    if any(part.state.partial for part in parts):
        return None
    cut = {
        (f, factors, size)
        for part, dims, x in zip(parts, match.inputs, call.inputs, strict=True)
        for f, factors, size in zip(dims, part.state.dims, x.shape, strict=True)
        if factors
    }
    if len(cut) != 1:
        return None
    ((f, factors, size),) = cut
    if f == NEVER or (f in match.reduced and match.addends):
        return None
    mean = call.bound.get("reduction") == MEAN
    if f in match.reduced and match.local is not None and not mean:
        return None  # one row of the batch, not one of every micro-batch
    made = []
    for dims, y in zip(match.outputs, call.outputs, strict=True):
        if f in match.reduced:
            kind = "avg" if mean else match.reduced[f]
            reduction: Any = "sum" if kind == "avg" else kind
            made.append(Part(State(((),) * len(dims), (0,), reduction), kind == "avg"))
        elif f in dims and y.shape[dims.index(f)] == size:
            made.append(Part(State(tuple(factors if other == f else () for other in dims))))
        else:
            return None
    return made


def _linear(match: Match, parts: Sequence[Part], outputs: Sequence[Tensor]) -> list[Part] | None:
    """Addends go through what is linear in them; means also past what is the same for all, as shares add up to one."""
    partial = {at for at, part in enumerate(parts) if part.state.partial}
    kinds = {(parts[at].state.reduction, parts[at].avg) for at in partial}
    if len(kinds) != 1:
        return None
    ((reduction, avg),) = kinds
    fits = any(partial == set(group) or (avg and partial <= set(group)) for group in match.linear)
    if reduction != "sum" or not fits:
        return None
    return [Part(State(((),) * y.ndim, (0,)), avg) for y in outputs]


def _put(value: Any, refs: Mapping[int, Ref]) -> Any:
    """A structure with some of its `Ref`s replaced."""
    if isinstance(value, Ref):
        return refs.get(value.number, value)
    if isinstance(value, dict):
        return {name: _put(part, refs) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_put(part, refs) for part in value])
    return value


def _alone(logical: Logical, number: int) -> Logical:
    """The part of a graph that makes one value."""
    return _without_unused(replace(logical, result=Ref(number), losses=(), writes={}))


def _without_unused(logical: Logical) -> Logical:
    """Without the ops whose results nobody uses."""
    used = {*refs_in(logical.result), *logical.writes.values()}
    used |= {n for loss in logical.losses for n in (loss.number, loss.gradient) if n is not None}
    ops = []
    for op in reversed(logical.ops):
        if used.intersection(op.numbers):
            used.update(op.inputs)
            ops.append(op)
    return replace(logical, ops=tuple(ops[::-1]))
