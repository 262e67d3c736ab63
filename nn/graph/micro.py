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
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from torch import Tensor

from ...placement.errors import SbpError
from ...sbp.call import NEVER, Call, Match, Ref, refs_in
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


def separated(logical: Logical, batched: Mapping[str, int], samples: int, like: Logical | None = None) -> Micro:
    """The step of a micro-batch; `batched` says along which dim an input has samples.

    `samples` are those of `like`, the same step for more of them: a dim of one sample looks like any other of size 1.
    """
    logical = expand(logical, lambda op: 2)
    other = logical if like is None else expand(like, lambda op: 2)
    asked = _Asked(other, batched, samples)
    pairs = _pairs(logical, other)
    parts = {n: asked.parts[n] for n in range(len(logical.sources))}
    totals: dict[int, int] = {}  # value -> the number of its total, below 0 until all are known
    ops = []
    for op, at in zip(logical.ops, pairs, strict=True):
        found, needed = asked.found[at]
        refs = {n: Ref(totals.setdefault(n, -1 - len(totals))) for n in (op.inputs[place] for place in needed)}
        ops.append(replace(op, args=_put(op.args, refs), kwargs=_put(dict(op.kwargs), refs)))
        parts.update(zip(op.numbers, found, strict=True))
    return _numbered(replace(logical, ops=tuple(ops)), parts, totals)


def _pairs(logical: Logical, other: Logical) -> list[int]:
    """For each op the same one of the other graph, which may have more that do nothing for one sample."""
    if other is logical:
        return list(range(len(logical.ops)))
    mine, theirs = ([str(op.op) for op in graph.ops] for graph in (logical, other))
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        found.update(zip(range(block.a, block.a + block.size), range(block.b, block.b + block.size), strict=True))
    missing = next((op for at, op in enumerate(logical.ops) if at not in found), None)
    if missing is not None:
        raise SbpError(
            "the step does something else with a micro-batch of one sample than with one of two: "
            f"{missing.op} at {missing.origin.line or 'no line'}\n"
            "  pass more samples, or make it with fewer micro_batches="
        )
    return [found[at] for at in range(len(logical.ops))]


class _Asked:
    """What the rule book says of every op: the parts of its results, and which inputs it has to have the totals of."""

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
        self.found = [self.ask(op) for op in logical.ops]

    def ask(self, op: LogicalOp) -> tuple[list[Part], tuple[int, ...]]:
        parts = [self.parts[n] for n in op.inputs]
        needed: tuple[int, ...] = ()
        found = self.of(op, parts)
        if found is None:
            sums = enumerate(zip(op.inputs, parts, strict=True))
            needed = tuple(place for place, (n, part) in sums if part.state.partial and n in self.given)
            for place in needed:
                parts[place] = Part(State(((),) * len(parts[place].state.dims)))
            found = self.of(op, parts) if needed else None
        if found is None:
            raise self.unknown(op)
        self.parts.update(zip(op.numbers, found, strict=True))
        if op.inputs and all(n in self.given for n in op.inputs):
            self.given.update(op.numbers)
        return found, needed

    def of(self, op: LogicalOp, parts: Sequence[Part]) -> list[Part] | None:
        """What an op makes of such parts; None where that takes more than one micro-batch."""
        if all(part.whole for part in parts):
            return [Part(State(((),) * y.ndim)) for y in op.outputs]
        states = tuple(part.state for part in parts)
        call = replace(self.logical.call(op), states=states, sizes=(self.samples,))
        answer = answer_of(call)
        if isinstance(answer, Match):
            cut = any(part.state.split for part in parts)
            made = _split(call, answer, parts) if cut else _linear(answer, parts, op.outputs)
            if made is not None:
                return made
        ways: Sequence[Any] = answer.also if isinstance(answer, Match) else answer or ()
        for way in ways:
            if way.inputs == states:
                return [Part(state, any(part.avg for part in parts)) for state in way.outputs]
        return None

    def unknown(self, op: LogicalOp) -> SbpError:
        """An op that cannot be done for a micro-batch alone."""
        lies = ", ".join(str(self.parts[n]) for n in op.inputs)
        return SbpError(
            f"{Call(op.op, (), {}, ()).name} at {op.origin.line or 'no line'} needs more than one micro-batch at once\n"
            f"  it is in {op.origin.module or 'no module'}, and its inputs are of the batch: {lies}\n"
            "  leave micro_batches= out, have batch norm in eval(), or write it so that samples do not depend on each "
            "other and the loss is a sum or a mean over them"
        )


def _numbered(logical: Logical, parts: Mapping[int, Part], totals: Mapping[int, int]) -> Micro:
    """The graph with its totals as inputs behind the others."""
    first, count = len(logical.sources), len(totals)
    number = {n: n if n < first else n + count for n in logical.fakes}
    number.update({low: first + at for at, low in enumerate(totals.values())})
    refs = {n: Ref(m) for n, m in number.items()}
    made = replace(
        logical,
        sources=(*logical.sources, *(Source(f"total {at}", "input", logical.fakes[n]) for at, n in enumerate(totals))),
        ops=tuple(
            replace(op, args=_put(op.args, refs), kwargs=_put(dict(op.kwargs), refs),
                    numbers=tuple(number[n] for n in op.numbers))
            for op in logical.ops
        ),
        result=_put(logical.result, refs),
        losses=tuple(
            replace(loss, number=number[loss.number],
                    gradient=None if loss.gradient is None else number[loss.gradient])
            for loss in logical.losses
        ),
        writes={name: number[n] for name, n in logical.writes.items()},
    )  # fmt: skip
    sums = tuple(Total(f"total {at}", _alone(made, number[n])) for at, n in enumerate(totals))
    return Micro(_without_unused(made), sums, {number[n]: part for n, part in parts.items()})


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
