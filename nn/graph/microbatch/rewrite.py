"""Micro-batches: what of a captured step is a part of the whole batch's, and how parts make the whole again.

    split     a piece along a dim: pieces are put behind each other
    avg, sum  an addend, with the micro-batch's share as its weight or as it is: losses and what follows linearly
    whole     the same in every micro-batch

The step is captured for the batch and for a micro-batch, or for a slice of the sequences of one. The rule book is asked
about the first, on an axis along which each sample is a rank's, and one along which each token is; numbers in it that
were made of the batch's size, as in a sum divided by it, are those of the batch. Where an op needs a sum over all
micro-batches, as a mean does that ignores some labels, and it depends on inputs alone, it becomes an input itself, a
*total*, which is known before the step begins; and so does what numbers the samples, and whatever else is made of
inputs alone and mixes them, as labels shifted by one: it is made of the batch, and cut. So a loss is exactly the
batch's. Attention in slices that looks back is told what came before (`sliced`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ....sbp.call import Ref, refs_in, renumbered
from ....sbp.logical import Logical, LogicalOp, Source
from ....sbp.state import Factors
from ..choose.decompose import expand
from .align import name_of, of_batch, paired
from .analysis import FILLED, TOKENS, Analysis, Counted
from .attention import attend
from .parts import Axes, Part

__all__ = ["Known", "Micro", "Share", "WholeValue", "separated"]


@dataclass(frozen=True, eq=False)
class Known:
    """A value made of the batch before the step, of arguments alone: micro-batches get their pieces of it, as `dims`
    are cut. Where it is a mask that hides later tokens, it must do so."""

    name: str
    graph: Logical
    dims: tuple[Factors, ...]
    hides: bool = False

    @cached_property
    def constant(self) -> bool:
        """Whether it is the same at every step."""
        used = [*refs_in(self.graph.result), *(n for op in self.graph.ops for n in op.inputs)]
        return all(n >= len(self.graph.sources) for n in used)


class WholeValue(NamedTuple):
    """A value of all micro-batches: `graph` makes that of one, of its inputs, and `how` says how they are joined."""

    name: str
    graph: Logical
    how: Part


class Share(NamedTuple):
    """How much of the batch a micro-batch is along some axes, as a number to compute with."""

    name: str
    axes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Micro:
    """A step of one micro-batch; `parts` says of every value what part of the batch's it is. `pasts` are arguments of
    attention in slices: what earlier slices left."""

    logical: Logical
    totals: tuple[WholeValue, ...]
    known: tuple[Known, ...]
    shares: tuple[Share, ...]
    pasts: tuple[str, ...]
    parts: Mapping[int, Part]


def separated(logical: Logical, whole: Logical, axes: Axes) -> Micro:
    """The step of a micro-batch, or of a slice of its sequences; `whole` is that of the batch."""
    logical, whole = expand(logical, lambda op: 2), expand(whole, lambda op: 2)
    made, counted = paired(logical, whole), set[int]()
    while True:
        try:
            return _Separated(logical, *made, Analysis(made[0], axes, counted)).made()
        except Counted as more:
            counted.add(more.number)


class _Separated:
    """A step in the making. What becomes an argument has the number of the value that it was, or one below 0."""

    def __init__(self, logical: Logical, whole: Logical, pairs: Sequence[LogicalOp], asked: Analysis) -> None:
        self.logical, self.whole, self.pairs, self.asked = logical, whole, pairs, asked
        self.parts = {n: asked.parts[n] for n in range(len(logical.sources))}
        self.fakes: dict[int, Tensor] = {}  # of values that become arguments
        self.ops: list[LogicalOp] = []
        self.totals: dict[int, int] = {}  # value -> the number of its total
        self.sums: dict[int, int] = {}  # the same of what is a total over slices
        self.shares: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        self.before: dict[int, int] = {}  # value that is made of the batch -> that of the batch
        self.known: dict[int, Known] = {}
        self.pasts: dict[int, str] = {}
        self.masks: dict[int, int] = {}
        self.next = max(logical.fakes, default=0) + 1

    def made(self) -> Micro:
        for op, other in zip(self.logical.ops, self.pairs, strict=True):
            found, needed = self.asked.ask(other, op)
            self.parts.update(zip(op.numbers, found, strict=True))
            if not self.is_known(op, other):
                self.ops.append(self.op(of_batch(op, other), other, needed))
        same = dict(zip(refs_in(self.whole.result), refs_in(self.logical.result), strict=True))
        result = renumbered(self.whole.result, same)
        return self.numbered(replace(self.logical, ops=tuple(self.ops), result=result, rebuild=self.whole.rebuild))

    def is_known(self, op: LogicalOp, other: LogicalOp) -> bool:
        """Whether an op is done for the batch before the step."""
        three = zip(op.numbers, other.numbers, op.outputs, strict=True)
        cuts = [(n, m, y) for n, m, y in three if m in self.asked.cuts]
        for n, m, y in cuts:
            self.before[n], self.fakes[n] = m, y
        return bool(cuts)

    def op(self, op: LogicalOp, other: LogicalOp, needed: Sequence[int]) -> LogicalOp:
        """An op of the micro-batch, with what it needs to know of all of them."""
        number = other.numbers[0]
        if number in self.asked.attends:
            return self.attends(op, self.asked.attends[number])
        if number in self.asked.picked:
            return self.picks(op, other, self.asked.picked[number])
        new = {op.inputs[place]: self.total(op.inputs[place], other.inputs[place]) for place in needed}
        for place, axes in self.asked.shares.get(number, {}).items():
            new[op.inputs[place]] = self.weighed(op, op.inputs[place], axes)
        return op.of(new)

    def total(self, n: int, theirs: int) -> int:
        """The number of a sum over all micro-batches, or over all slices of one."""
        state = self.asked.parts[theirs].state
        sums = self.sums if state.split else self.totals
        if n not in sums:
            sums[n] = self.new(self.logical.fakes[n])
            if state.split:
                self.known[sums[n]] = Known("", _alone(self.whole, theirs), state.dims)
        return sums[n]

    def weighed(self, op: LogicalOp, n: int, axes: tuple[int, ...]) -> int:
        """A value times the micro-batch's share along some axes."""
        fake = self.logical.fakes[n]
        key = axes, fake.dtype
        if key not in self.shares:
            self.shares[key] = self.new(fake.new_empty(()))
        self.next += 1
        mul, args = torch.ops.aten.mul.Tensor, (Ref(n), Ref(self.shares[key]))
        self.ops.append(replace(op, op=mul, args=args, kwargs={}, outputs=(fake,), numbers=(self.next,)))
        return self.next

    def new(self, fake: Tensor) -> int:
        number = -1 - len(self.fakes)
        self.fakes[number] = fake
        return number

    def picks(self, op: LogicalOp, other: LogicalOp, start: int) -> LogicalOp:
        """Rows of a weight, as many as there are tokens, as those of this slice."""
        (y,), dim = op.outputs, self.logical.call(op).bound["dim"]
        rows = torch.empty(y.shape[dim], dtype=torch.long, device="meta")
        end = start + other.outputs[0].shape[dim]
        numbers = LogicalOp(torch.ops.aten.arange.start, (start, end), {}, (torch.empty(end - start),), (0,))
        place = self.new(rows)
        (factors,) = (factors for factors in self.asked.parts[other.numbers[0]].state.dims if factors)
        self.known[place] = Known("", Logical((), (numbers,), Ref(0)), (factors,))
        args = (op.args[0], dim, Ref(place))
        return replace(op, op=torch.ops.aten.index_select.default, args=args, kwargs={})

    def attends(self, op: LogicalOp, mask: int | None) -> LogicalOp:
        """Attention of a slice, which gets what earlier ones left."""
        call, (y,) = self.logical.call(op), op.outputs
        length, hidden = self.asked.axes.sizes[TOKENS], None
        if mask is not None:
            hidden = Ref(self.masks[mask] if mask in self.masks else self.mask(mask, op))
        past = self.new(torch.empty(2, dtype=torch.long, device="meta"))
        self.pasts[past] = ""
        scale = call.bound["scale"] or 1 / sqrt(call.bound["query"].shape[-1])
        args = (*op.args[:3], Ref(past), hidden, length, scale, bool(self.logical.losses))
        sums = y.new_empty(y.shape[:-1], dtype=torch.promote_types(y.dtype, torch.float32))
        self.next += 1
        return replace(op, op=attend, args=args, kwargs={}, outputs=(y, sums), numbers=(*op.numbers, self.next))

    def mask(self, mask: int, op: LogicalOp) -> int:
        """The number of a mask with the rows of a slice, and all columns."""
        theirs, mine = self.whole.fakes[mask], self.logical.fakes[op.inputs[3]]
        made = self.new(mine.new_empty((*mine.shape[:-1], theirs.shape[-1])))
        self.known[made] = Known("", _alone(self.whole, mask), self.asked.masks[mask], hides=True)
        self.masks[mask] = made
        return made

    def numbered(self, logical: Logical) -> Micro:
        """The graph with all that is known before as arguments behind the others."""
        logical = logical.pruned(self.totals)
        used = logical.ends | {n for op in logical.ops for n in op.inputs} | set(self.totals)
        self.known.update(
            {n: Known("", _alone(self.whole, m), self.asked.cuts[m]) for n, m in self.before.items() if n in used}
        )
        names = {number: f"total {at}" for at, number in enumerate(self.totals.values())}
        names.update({n: f"share {at}" for at, n in enumerate(self.shares.values())})
        names.update({n: f"known {at}" for at, n in enumerate(n for n in self.known if n in used)})
        names.update({n: f"past {at}" for at, n in enumerate(n for n in self.pasts if n in used)})
        first = len(logical.sources)
        number = {n: n if n < first else n + len(names) for n in logical.fakes}
        number.update({n: first + at for at, n in enumerate(names)})
        more = [Source(name, "input", self.fakes[n]) for n, name in names.items()]
        made = replace(logical.map(number), sources=(*logical.sources, *more))
        totals = tuple(WholeValue(names[low], _alone(made, number[n]), self.parts[n]) for n, low in self.totals.items())
        known = tuple(replace(known, name=names[n]) for n, known in self.known.items() if n in names)
        shares = tuple(Share(names[n], *key) for key, n in self.shares.items())
        pasts = tuple(names[n] for n in self.pasts if n in names)
        parts = {number[n]: part for n, part in self.parts.items() if n in number}
        return Micro(made.pruned(), totals, known, shares, pasts, parts)


def _alone(logical: Logical, number: int) -> Logical:
    """The part of a graph that makes one value."""
    ops = tuple(_of_shape(op) if name_of(op) in FILLED else op for op in logical.ops)
    return replace(logical, ops=ops, result=Ref(number), losses=(), writes={}).pruned()


def _of_shape(op: LogicalOp) -> LogicalOp:
    """A filled tensor of another's shape, without that other."""
    (y,) = op.outputs
    kwargs = {"dtype": y.dtype}
    return replace(op, op=torch.ops.aten.full.default, args=(list(y.shape), FILLED[name_of(op)]), kwargs=kwargs)
