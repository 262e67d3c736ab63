"""Micro-batches: what of a captured step is a part of the whole batch's, and how parts make the whole again.

    split     a piece along a dim: pieces are put behind each other
    avg, sum  an addend, with the micro-batch's share as its weight or as it is: losses and what follows linearly
    whole     the same in every micro-batch

The step is captured for the batch and for a micro-batch. The rule book is asked about the first, on one axis along
which each sample is a rank's; numbers in it that were made of the batch's size, as in a sum divided by it, are those of
the batch. Where an op needs a sum over all micro-batches, as a mean does that ignores some labels, and it depends on
inputs alone, it becomes an input itself, a *total*, which is known before the step begins; and so does what numbers the
samples. So a loss is exactly the batch's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ...sbp.call import NEVER, Call, Match, Ref, refs_in
from ...sbp.joint.ways import answer_of
from ...sbp.logical import Logical, LogicalOp, Source
from ...sbp.state import State
from .expand import expand
from .paired import name_of, of_batch, pairs

MEAN = 1  # as ATen numbers reductions
# Ops that make a dim of the batch's size of nothing, the same in every place of it.
EVEN = {
    *("expand", "expand_as", "broadcast_to", "repeat", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full"),
    *("zeros_like", "ones_like", "full_like", "scalar_tensor", "empty", "new_empty", "empty_like"),
}
LIKE = {"zeros_like": 0, "ones_like": 1}
SHAPED = {*LIKE, "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}  # of another's shape only
# Ops that show numbers otherwise, and do not compute with them.
SEEN = {
    *("unsqueeze", "expand", "view", "reshape", "to", "_to_copy", "contiguous", "clone", "alias", "detach", "squeeze"),
    *("permute", "transpose", "slice"),
}
SHIFTS = {"add.Scalar", "sub.Scalar", "rsub.Scalar", "add.Tensor", "sub.Tensor", "rsub.Tensor"}

__all__ = ["Micro", "Part", "Total", "separated"]


class Part(NamedTuple):
    """What a value of a micro-batch is of the batch's. `state` is on the axis of samples; what is `odd` is of the
    micro-batch alone, and nobody may use it. `rows` are samples numbered from 0, by this value: they may index what has
    these samples."""

    state: State
    avg: bool = False
    odd: bool = False
    rows: int | None = None

    @property
    def dim(self) -> int | None:
        """The dim along which it is a piece, if it is one in a row."""
        return next((d for d, factors in enumerate(self.state.dims) if factors == (0,)), None)

    @property
    def whole(self) -> bool:
        return not self.state.split and not self.state.partial and not self.odd

    def __str__(self) -> str:
        if self.odd:
            return "numbered by itself"
        if self.whole:
            return "whole"
        if self.state.partial:
            return "avg" if self.avg else self.state.reduction
        return f"split along {self.dim}"


class _Counted(Exception):
    """Numbers of samples that something computes with, so that they must be those of the batch."""

    def __init__(self, number: int) -> None:
        self.number = number


class Numbers(NamedTuple):
    """What an op makes of nothing that differs from sample to sample along `dim`: micro-batches get their pieces."""

    name: str
    op: LogicalOp
    dim: int

    def value(self) -> Tensor:
        made: Tensor = self.op.op(*self.op.args, **self.op.kwargs)
        return made


class Total(NamedTuple):
    """A value of all micro-batches: `graph` makes that of one, of its inputs, and `how` says how they are joined."""

    name: str
    graph: Logical
    how: Part


@dataclass(frozen=True, eq=False)
class Micro:
    """A step of one micro-batch; `parts` says of every value what part of the batch's it is."""

    logical: Logical
    totals: tuple[Total, ...]
    numbers: tuple[Numbers, ...]
    parts: Mapping[int, Part]


def separated(logical: Logical, batched: Mapping[str, int], samples: int, whole: Logical) -> Micro:
    """The step of a micro-batch. `whole` is that of the batch, of so many samples; `batched` says along which dim an
    input has them."""
    logical, whole = expand(logical, lambda op: 2), expand(whole, lambda op: 2)
    counted: set[int] = set()
    while True:
        try:
            return _separated(logical, whole, _Asked(whole, batched, samples, counted))
        except _Counted as more:
            counted.add(more.number)


def _separated(logical: Logical, whole: Logical, asked: "_Asked") -> Micro:
    parts = {n: asked.parts[n] for n in range(len(logical.sources))}
    totals: dict[int, int] = {}  # value -> the number of its total, below 0 until all are known
    cuts: dict[int, Numbers] = {}
    ops = []
    for op, other in zip(logical.ops, pairs(logical, whole), strict=True):
        found, needed = asked.ask(other, op)
        if other.numbers[0] in asked.cuts:
            cuts[op.numbers[0]] = Numbers(f"numbers {len(cuts)}", other, asked.cuts[other.numbers[0]])
        refs = {n: Ref(totals.setdefault(n, -1 - len(totals))) for n in (op.inputs[place] for place in needed)}
        op = of_batch(op, other)
        ops.append(replace(op, args=_put(op.args, refs), kwargs=_put(dict(op.kwargs), refs)))
        parts.update(zip(op.numbers, found, strict=True))
    same = {n: Ref(m) for n, m in zip(refs_in(whole.result), refs_in(logical.result), strict=True)}
    made = replace(logical, ops=tuple(ops), result=_put(whole.result, same), rebuild=whole.rebuild)
    return _numbered(made, parts, totals, cuts)


class _Asked:
    """What the rule book says of every op: the parts of its results, and which inputs it has to have the totals of."""

    def __init__(self, logical: Logical, batched: Mapping[str, int], samples: int, counted: set[int]) -> None:
        self.logical, self.samples, self.counted = logical, samples, counted
        self.parts: dict[int, Part] = {}
        self.given: set[int] = set()  # values that depend on inputs and buffers alone
        for n, source in enumerate(logical.sources):
            dims: list[tuple[int, ...]] = [()] * source.fake.ndim
            if source.kind == "input" and source.name in batched:
                dims[batched[source.name]] = (0,)
            self.parts[n] = Part(State(tuple(dims)))
            if source.kind != "parameter" and not source.requires_grad and source.name not in logical.writes:
                self.given.add(n)
        self.cuts: dict[int, int] = {}  # what ops make of nothing -> the dim along which samples have their own
        self.done = 0

    def ask(self, op: LogicalOp, mine: LogicalOp) -> tuple[list[Part], tuple[int, ...]]:
        """The parts of an op of the batch that is `mine` in the micro-batch, and the inputs that must be totals."""
        while self.logical.ops[self.done] is not op:
            self.one(self.logical.ops[self.done], None)
            self.done += 1
        self.done += 1
        return self.one(op, mine)

    def one(self, op: LogicalOp, mine: LogicalOp | None) -> tuple[list[Part], tuple[int, ...]]:
        parts = [self.parts[n] for n in op.inputs]
        needed: tuple[int, ...] = ()
        found = self.of(op, mine, parts)
        if found is None:
            sums = enumerate(zip(op.inputs, parts, strict=True))
            needed = tuple(place for place, (n, part) in sums if part.state.partial and n in self.given)
            for place in needed:
                parts[place] = Part(State(((),) * len(parts[place].state.dims)))
            found = self.of(op, mine, parts) if needed else None
        if found is None:
            raise self.unknown(op)
        self.parts.update(zip(op.numbers, found, strict=True))
        plain = all(n in self.given for n in op.inputs) or name_of(op) in LIKE
        if plain and torch.Tag.nondeterministic_seeded not in op.op.tags:
            self.given.update(op.numbers)
        return found, needed

    def of(self, op: LogicalOp, mine: LogicalOp | None, parts: Sequence[Part]) -> list[Part] | None:
        """What an op makes of such parts; None where that takes more than one micro-batch."""
        if any(part.odd for part in parts):
            return None
        rows = next((part.rows for part in parts if part.rows is not None), None)
        if rows is not None:
            return self.indexed(op, parts, rows)
        if all(part.whole for part in parts) or name_of(op) in SHAPED:
            return [self.fresh(op, y, None if mine is None else mine.outputs[at]) for at, y in enumerate(op.outputs)]
        states = tuple(part.state for part in parts)
        call = replace(self.logical.call(op), states=states, sizes=(self.samples,))
        answer = answer_of(call)
        if isinstance(answer, Match):
            cut = any(part.state.split for part in parts)
            made = _split(call, answer, parts, self.samples) if cut else _linear(call, answer, parts, op.outputs)
            if made is not None:
                return made
        ways: Sequence[Any] = answer.also if isinstance(answer, Match) else answer or ()
        for way in ways:
            if way.inputs == states:
                return [Part(state, any(part.avg for part in parts)) for state in way.outputs]
        return None

    def indexed(self, op: LogicalOp, parts: Sequence[Part], rows: int) -> list[Part] | None:
        """What an op makes of the numbers of samples: the same seen otherwise, or the samples that they number."""
        name = name_of(op)
        if len(parts) == 1 and name.partition(".")[0] in SEEN:
            found = self.of(op, None, [parts[0]._replace(rows=None)])
            return None if found is None else [part._replace(rows=rows) for part in found]
        x, *others = parts
        at = [part.rows is not None for part in others].index(True) if any(p.rows is not None for p in others) else -1
        indices = list(op.args[1]) if name == "index.Tensor" else []
        if at == 0 and x.dim == 0 and x.rows is None and indices and None not in indices:
            dims, end = others[0].state.dims, op.outputs[0].ndim
            shapes = [self.logical.fakes[n].ndim for n in op.inputs[1:]]
            place = max(shapes) - len(dims) + next(d for d, factors in enumerate(dims) if factors)
            fits = all(
                part.whole or (part.dim is not None and part.dim - len(part.state.dims) == place - max(shapes))
                for part in others[1:]
            )
            if fits:
                return [Part(State(tuple((0,) if d == place else () for d in range(end))))]
        raise _Counted(rows)

    def fresh(self, op: LogicalOp, y: Tensor, mine: Tensor | None) -> Part:
        """What is made of what is whole: whole, unless it has a dim of the batch's size."""
        name = name_of(op).partition(".")[0]
        shape = list(y.shape if mine is None else mine.shape)
        if mine is None and name == "expand":  # which there is not for one sample
            shape = [1 if d < y.ndim - x.ndim else n for x in (self.logical.fakes[op.inputs[0]],)
                     for d, n in enumerate([*[1] * (y.ndim - x.ndim), *x.shape])]  # fmt: skip
            shape = [m if n == self.samples else n for n, m in zip(y.shape, shape, strict=True)]
        longer = [d for d, (n, m) in enumerate(zip(y.shape, shape, strict=True)) if n != m]
        even = name in EVEN or torch.Tag.nondeterministic_seeded in op.op.tags
        number = op.numbers[0]
        if len(longer) == 1 and name == "arange" and not op.inputs and number not in self.counted:
            return Part(State(((0,),)), rows=number)
        if len(longer) == 1 and not even and not op.inputs and len(op.numbers) == 1:
            self.cuts[op.numbers[0]] = longer[0]
            self.given.update(op.numbers)
        elif len(longer) > 1 or (longer and not even):
            return Part(State(((),) * y.ndim), odd=True)
        return Part(State(tuple((0,) if d in longer else () for d in range(y.ndim))))

    def unknown(self, op: LogicalOp) -> SbpError:
        """An op that cannot be done for a micro-batch alone."""
        lies = ", ".join(str(self.parts[n]) for n in op.inputs)
        return SbpError(
            f"{name_of(op)} at {op.origin.line or 'no line'} needs more than one micro-batch at once\n"
            f"  it is in {op.origin.module or 'no module'}, and its inputs are of the batch: {lies}\n"
            "  leave micro_batches= out, have batch norm in eval(), or write it so that samples do not depend on each "
            "other and the loss is a sum or a mean over them"
        )


def _numbered(
    logical: Logical, parts: Mapping[int, Part], totals: Mapping[int, int], cuts: Mapping[int, Numbers]
) -> Micro:
    """The graph with its totals, and what numbers samples, as inputs behind the others."""
    first, count = len(logical.sources), len(totals) + len(cuts)
    number = {n: n if n < first else n + count for n in logical.fakes}
    number.update({low: first + at for at, low in enumerate(totals.values())})
    number.update({n: first + len(totals) + at for at, n in enumerate(cuts)})
    refs = {n: Ref(m) for n, m in number.items()}
    names = [(f"total {at}", n) for at, n in enumerate(totals)] + [(cut.name, n) for n, cut in cuts.items()]
    made = replace(
        logical,
        sources=(*logical.sources, *(Source(name, "input", logical.fakes[n]) for name, n in names)),
        ops=tuple(
            replace(op, args=_put(op.args, refs), kwargs=_put(dict(op.kwargs), refs),
                    numbers=tuple(number[n] for n in op.numbers))
            for op in logical.ops
            if op.numbers[0] not in cuts
        ),
        result=_put(logical.result, refs),
        losses=tuple(
            replace(loss, number=number[loss.number],
                    gradient=None if loss.gradient is None else number[loss.gradient])
            for loss in logical.losses
        ),
        writes={name: number[n] for name, n in logical.writes.items()},
    )  # fmt: skip
    sums = tuple(Total(f"total {at}", _alone(made, number[n]), parts[n]) for at, n in enumerate(totals))
    known = {number[n]: part for n, part in parts.items()}
    return Micro(_without_unused(made), sums, tuple(cuts.values()), known)


def _split(call: Call, match: Match, parts: Sequence[Part], samples: int) -> list[Part] | None:
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
    for part, dims, x in zip(parts, match.inputs, call.inputs, strict=True):
        if part.whole and any(g == f and n > 1 for g, n in zip(dims, x.shape, strict=True)):
            return None  # whole along what others have in pieces
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


def _linear(call: Call, match: Match, parts: Sequence[Part], outputs: Sequence[Tensor]) -> list[Part] | None:
    """Addends go through what is linear in them; means also past what is the same for all, as shares add up to one."""
    partial = {at for at, part in enumerate(parts) if part.state.partial}
    kinds = {(parts[at].state.reduction, parts[at].avg) for at in partial}
    if len(kinds) != 1:
        return None
    ((reduction, avg),) = kinds
    fits = any(partial == set(group) or (avg and partial <= set(group)) for group in match.linear)
    if reduction != "sum" or not (fits or (avg and call.name in SHIFTS)):
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
    ops = tuple(_of_shape(op) if name_of(op) in LIKE else op for op in logical.ops)
    return _without_unused(replace(logical, ops=ops, result=Ref(number), losses=(), writes={}))


def _of_shape(op: LogicalOp) -> LogicalOp:
    """A filled tensor of another's shape, without that other."""
    (y,) = op.outputs
    kwargs = {"dtype": y.dtype}
    return replace(op, op=torch.ops.aten.full.default, args=(list(y.shape), LIKE[name_of(op)]), kwargs=kwargs)


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
