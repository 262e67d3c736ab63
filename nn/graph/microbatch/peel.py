"""The step of one micro-batch, or slice: a step along time with that axis taken off.

    value that lies otherwise than its user wants it         becomes
      made of arguments alone                                an argument `known`: made of the whole batch, and cut
      whole, wanted in pieces                                rows of it, of which an argument `known` has the numbers
      whole, wanted as an addend                             times an argument `share`

Each op is what ranks would run of it, with the sizes of this piece. So a `Logical` comes out that knows of no time.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor

from ....placement.errors import SbpError
from ....placement.structure import mapped
from ....sbp.call import Ref, Way, in_order, refs_in
from ....sbp.layout import Layout, RunLayout, memory_order
from ....sbp.logical import Logical, LogicalOp, Source
from ....sbp.state import Factors, State
from ....sbp.traits import traits
from ..choose.decompose import opened, part_of
from .along import Along, change
from .attention import attend
from .micro import (
    CAST,
    BatchDraw,
    Known,
    MaskedPlaces,
    Micro,
    Share,
    drawn_alone,
    ends_of,
    filled,
    is_filled,
    made_alone,
    program_of,
    text_of,
)
from .opened_calls import OpenedCalls, SeenPiece
from .owned_samples import taken_from
from .sample_parts import of_piece

__all__ = ["peeled"]

aten = torch.ops.aten


def peeled(made: Along, *, whole_draws: bool = True) -> list[Micro]:
    """The step of each piece, of which slices of one micro-batch follow each other; one for all that run the same.
    Without `whole_draws` each draws random numbers of its own for its samples."""
    steps: list[_Peeled] = []
    micros: list[Micro] = []
    for k in range(prod(map(len, made.runs.lengths))):
        step = next((step for step in steps if step.serves(k)), None)
        if step is None:
            step = _Peeled(made, k, whole_draws)
            if made.owner:  # of other samples, and yet the same
                step.micro = next((one for one in micros if program_of(one) == program_of(step.micro)), step.micro)
            steps.append(step)
        micros.append(step.micro)
    return micros


class _Peeled:
    """The step of a piece in the making. Arguments that are new have numbers below 0."""

    def __init__(self, made: Along, k: int, whole_draws: bool) -> None:
        self.made, self.k, self.logical, self.whole_draws = made, k, made.logical, whole_draws
        self.lengths = list(product(*made.runs.lengths))  # of all pieces
        self.next = max(self.logical.fakes, default=-1) + 1
        self.fakes = {n: self.local(s.fake, made.states[n]) for n, s in enumerate(self.logical.sources)}
        self.same: dict[int, int] = {}  # a value that is another, since its op has nothing to do here
        self.ops: list[LogicalOp] = []
        self.placed: list[tuple[LogicalOp, Way, SeenPiece, Any]] = []  # ops that looked at places, and what came of it
        self.new: dict[int, Known | Share | None] = {}  # arguments by number; None is the past of attention
        self.told: dict[int, str] = {}
        self.drawn: list[BatchDraw] = []
        self.boxed: dict[Any, int] = {}
        self.calls = OpenedCalls(self.fakes)
        self.filled = {op.numbers[0]: op for op in self.logical.ops if is_filled(op) and not made.owner}
        for op, way in zip(self.logical.ops, made.ways, strict=True):
            self.put(op, way)
        self.micro = self.finished()

    # Pieces that run the same

    def serves(self, k: int) -> bool:
        """Whether another piece runs the same: it is as long, and what looks at places finds nothing else to do."""
        return (
            self.lengths[k] == self.lengths[self.k]
            and not self.made.owner
            and all(
                self.alike(replace(seen, rank=k, looked={}), seen, op, way, text) for op, way, seen, text in self.placed
            )
        )

    def alike(self, other: SeenPiece, mine: SeenPiece, op: LogicalOp, way: Way, text: Any) -> bool:
        there = ((other.out_spans if out else other.spans)(at, dim) for out, at, dim in mine.looked)
        return list(there) == list(mine.looked.values()) or text_of(self.calls.of(op, way, other)) == text

    # Ops

    def put(self, op: LogicalOp, way: Way) -> None:
        if op.numbers[0] in self.made.attends:
            self.attends(op)
            return
        if op.draws_unread and len(op.numbers) == 1 and (self.whole_draws or not way.outputs[0].split):
            self.draws(op, way)
            return
        if any(n in self.made.owner for n in (*op.numbers, *op.inputs)) and self.of_owner(op, way):
            return
        inputs = [self.box(n, to, op) for n, to in zip(op.inputs, way.inputs, strict=True)]
        if op.numbers[0] in self.made.scatters:
            inputs[1] = self.places(op, way)
        order = iter(inputs)
        args, kwargs = mapped((op.args, in_order(op.op, op.kwargs)), Ref, lambda _: Ref(next(order)))
        mine = replace(op, args=args, kwargs=kwargs)
        if not any(state.split for state in (*way.inputs, *way.outputs)):
            self.add(mine)
            return
        # One with a backward of its own shows it to nobody, and some would not run without values.
        if way.local is None and (not isinstance(op.op, torch._ops.OpOverload) or "unfaked" in traits(op.name)):
            outputs = tuple(self.local(y, state) for y, state in zip(op.outputs, way.outputs, strict=True))
            self.add(replace(mine, op=of_piece(op, outputs) if op.is_part else op.op, outputs=outputs))
            return
        seen = SeenPiece(self.k, *self.layouts(op, way))
        parts = self.calls.of(mine, way, seen)
        if seen.looked:
            self.placed.append((mine, way, seen, text_of(parts)))
        names, ends = dict(enumerate(inputs)), dict(zip(refs_in(parts.result), op.numbers, strict=True))
        for part in parts.ops:
            if not set(part.numbers) <= names.keys():
                for n in part.numbers:
                    if n not in names:
                        self.next += 1
                        names[n] = ends.get(n, self.next)
                made = part_of(op, part).of(names, numbers=tuple(names[n] for n in part.numbers))
                self.add(replace(made, lies=op.lies if ends.keys() & set(part.numbers) else None))
        self.same.update({n: names[m] for m, n in ends.items() if names[m] != n})

    def of_owner(self, op: LogicalOp, way: Way) -> bool:
        """Take samples that this piece owns, or put them together, or do nothing for others."""
        owner = self.made.owner
        takes = taken_from(op, self.logical.call(op))
        if takes is not None and op.inputs[0] not in owner:
            dim, places = takes
            first = self.layout(way.inputs[0], self.logical.fakes[op.inputs[0]].shape).spans(self.k)[dim][0][0]
            for n, (lo, hi) in zip(op.numbers, places, strict=True):
                drops = self.logical.fakes[n].ndim < self.logical.fakes[op.inputs[0]].ndim
                how = aten.select.int if drops else aten.narrow.default
                args: tuple[Any, ...] = (Ref(0), dim, lo - first) if drops else (Ref(0), dim, lo - first, hi - lo)
                if owner[n] == self.k:
                    self.parts_of(op, how, args, [op.inputs[0]], n)
            return True
        if all(n in owner for n in op.numbers):
            if owner[op.numbers[0]] != self.k:
                return True
        elif any(state.split for state in way.outputs) and all(n in owner for n in op.inputs):
            mine = [n for n in op.inputs if owner[n] == self.k]
            args = ([Ref(at) for at in range(len(mine))], self.logical.call(op).bound["dim"])
            self.parts_of(op, op.op, args, mine, op.numbers[0])
            return True
        return False

    def parts_of(self, op: LogicalOp, function: Any, args: Any, inputs: Sequence[int], made: int) -> None:
        """Another call in the place of an op, or of one of its results."""
        mine = [self.same.get(n, n) for n in inputs]
        (part,) = opened(function, args, {}, [self.fakes[n] for n in mine]).ops
        self.add(part_of(op, part).of(dict(enumerate(mine)), numbers=(made,)))

    def draws(self, op: LogicalOp, way: Way) -> None:
        """Random numbers are arguments: those of the whole batch, cut."""
        (n,), (y,), (state,) = op.numbers, op.outputs, way.outputs
        alone, fake = drawn_alone(self.logical, op), self.local(y, state)
        (held,) = (alone.fakes[number].dtype for number in refs_in(alone.result))
        self.drawn.append(BatchDraw(f"drawn {n}", alone, state.dims))
        mine = self.argument(fake.to(held), self.drawn[-1])
        if held is fake.dtype:
            self.same[n] = mine
        else:
            args, how = (Ref(mine),), {"dtype": fake.dtype}
            self.add(replace(op, op=CAST, args=args, kwargs=how, outputs=(fake,), lies=None))

    def add(self, op: LogicalOp) -> None:
        self.ops.append(op)
        self.fakes.update(zip(op.numbers, op.outputs, strict=True))

    def layouts(self, op: LogicalOp, way: Way) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        fakes = self.logical.fakes
        ins = tuple(self.layout(s, fakes[n].shape, fakes[n].dtype) for n, s in zip(op.inputs, way.inputs, strict=True))
        return ins, tuple(self.layout(s, y.shape, y.dtype) for y, s in zip(op.outputs, way.outputs, strict=True))

    def layout(self, state: State, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Layout:
        return RunLayout(self.made.runs, state, tuple(shape), dtype)

    def local(self, x: Tensor, state: State) -> Tensor:
        """The part of a tensor that a piece has, without values."""
        if not state.split:
            return x
        shape, order = self.layout(state, x.shape).local_shape(self.k), memory_order(x) or range(x.ndim)
        laid = torch.empty([shape[d] for d in order], dtype=x.dtype, device="meta")
        return laid.permute([list(order).index(d) for d in range(x.ndim)])

    # Values in other states

    def box(self, n: int, to: State, op: LogicalOp) -> int:
        """The number of a value that lies so, for an op that wants it."""
        mine, have = self.same.get(n, n), self.made.states[n]
        if self.made.owner.get(n, self.k) != self.k:
            return self.nothing(n)
        if have == to:
            return mine
        if (n, to) not in self.boxed:
            found, share = change(have, to), to.partial
            if n in self.made.given and (found is None or found.cut):
                mine = self.known(n, to)
            elif found is not None:  # as `along` has seen to
                share = found.share
                for d in found.cut:
                    mine = self.rows(mine, d, self.logical.fakes[n].shape[d], to.dims[d], op)
            self.boxed[n, to] = self.weighed(mine, share, op) if share else mine
        return self.boxed[n, to]

    def known(self, n: int, to: State) -> int:
        """A value of arguments alone, made of the whole batch and cut; one that is filled is made for the piece."""
        key = n, to.dims
        if key not in self.boxed:
            fake = self.local(self.logical.fakes[n], State(to.dims))
            if n in self.filled:
                self.next = self.boxed[key] = self.next + 1
                self.add(replace(filled(self.logical, self.filled[n], fake), numbers=(self.next,)))
                return self.next
            self.boxed[key] = self.argument(fake, Known("", made_alone(self.logical, n), to.dims), f"{n} {to.dims}")
        return self.boxed[key]

    def rows(self, n: int, dim: int, size: int, factors: Factors, op: LogicalOp) -> int:
        """The rows of a whole value that belong to a piece."""
        if (size, factors) not in self.boxed:
            line = LogicalOp(
                aten.arange.default, (size,), {}, (torch.empty(size, dtype=torch.long, device="cpu"),), (0,)
            )
            fake = self.local(torch.empty(size, dtype=torch.long, device="meta"), State((factors,)))
            what = Known("", Logical((), (line,), Ref(0)), (factors,))
            self.boxed[size, factors] = self.argument(fake, what, f"rows {size} {factors}")
        numbers = self.boxed[size, factors]
        (part,) = opened(aten.index_select.default, (Ref(0), dim, Ref(1)), {}, [self.fakes[n], self.fakes[numbers]]).ops
        self.next += 1
        self.add(part_of(replace(op, grad=True), part).of({0: n, 1: numbers}, numbers=(self.next,)))
        return self.next

    def nothing(self, n: int) -> int:
        """Zeros in the place of what another piece owns."""
        if ("nothing", n) not in self.boxed:
            fake, self.boxed["nothing", n] = self.logical.fakes[n], self.next + 1
            self.next, how = self.next + 1, {"dtype": fake.dtype, "device": fake.device}
            self.add(LogicalOp(aten.full.default, (list(fake.shape), 0), how, (fake,), (self.next,), grad=False))
        return self.boxed["nothing", n]

    def places(self, op: LogicalOp, way: Way) -> int:
        """The mask of an op that puts what is of samples into places of these, which is looked at before each step."""
        (x, mask, source), state = (self.logical.fakes[n] for n in op.inputs), way.inputs[1]
        made, line = made_alone(self.logical, op.inputs[1]), op.origin.line
        each, times = source.numel() // len(x), x.numel() // mask.numel()
        what = MaskedPlaces("", made, state.dims, False, each, times, line)
        return self.argument(self.local(mask, state), what, f"places {op.numbers[0]}")

    def weighed(self, n: int, axes: tuple[int, ...], op: LogicalOp) -> int:
        """A value times the share that a piece is along some axes."""
        fake = self.fakes[n]
        if (axes, fake.dtype) not in self.boxed:
            self.boxed[axes, fake.dtype] = self.argument(
                torch.empty((), dtype=fake.dtype, device="meta"), Share("", axes, fake.dtype)
            )
        args = Ref(n), Ref(self.boxed[axes, fake.dtype])
        self.next += 1
        made = LogicalOp(aten.mul.Tensor, args, {}, (fake,), (self.next,), True, op.origin, op.placement)
        self.add(made)
        return self.next

    def argument(self, fake: Tensor, what: Known | Share | None, told: str = "") -> int:
        """A new argument. Pieces that do other things for their own samples call what is known by what is `told`."""
        number = -1 - len(self.new)
        self.told[number] = told
        self.new[number], self.fakes[number] = what, fake
        return number

    # Attention in slices

    def attends(self, op: LogicalOp) -> None:
        """Attention of a slice, which gets what earlier ones left."""
        op, whole, mask = op.of(self.same), self.logical.call(op), self.made.attends[op.numbers[0]]
        query = self.fakes[op.inputs[0]]
        length, hidden = whole.bound["query"].shape[-2], None
        if mask is not None:
            hidden = Ref(self.hides(mask))
        past = self.argument(torch.empty(2, dtype=torch.long, device="meta"), None)
        scale = whole.bound["scale"] or 1 / sqrt(query.shape[-1])
        args = (*op.args[:3], Ref(past), hidden, length, scale, bool(self.logical.losses))
        inputs = [self.fakes[n] for n in refs_in(args)]
        order = iter(range(len(inputs)))
        (part,) = opened(attend, mapped(args, Ref, lambda _: Ref(next(order))), {}, inputs).ops
        self.next += 1
        self.add(replace(op, op=attend, args=args, kwargs={}, outputs=part.outputs, numbers=(*op.numbers, self.next)))

    def hides(self, mask: int) -> int:
        """A mask with the rows of a slice, and all columns."""
        if ("mask", mask) not in self.boxed:
            state = self.made.masks[mask]
            fake = self.local(self.logical.fakes[mask], state)
            known = Known("", made_alone(self.logical, mask), state.dims, hides=True)
            self.boxed["mask", mask] = self.argument(fake, known)
        return self.boxed["mask", mask]

    # The graph

    def finished(self) -> Micro:
        """The graph, with new arguments behind the others."""
        whole, states = self.logical, self.made.states
        self.same.update({n: self.nothing(n) for n in whole.ends if self.made.owner.get(n, self.k) != self.k})
        logical = replace(replace(whole, ops=()).map(self.same), ops=tuple(self.ops)).pruned()
        used = logical.ends | {n for op in logical.ops for n in op.inputs}
        placed = (each for each in self.placed if not used.isdisjoint(self.same.get(n, n) for n in each[0].numbers))
        self.placed = [*{self.calls.key(*each[:3]): each for each in placed}.values()]  # equal ones once
        names, counts = dict[int, str](), dict.fromkeys(["known", "share", "past"], 0)
        for n, what in self.new.items():
            if isinstance(what, BatchDraw):
                names[n] = what.name
            elif self.made.owner and self.told[n]:
                names[n] = f"known {self.told[n]}"
            else:
                kind = "known" if isinstance(what, Known) else "past" if what is None else "share"
                names[n] = f"{kind} {counts[kind]}"
                counts[kind] += 1
        mine = {n: name for n, name in names.items() if n in used}
        first = len(logical.sources)
        number = {n: n if 0 <= n < first else n + len(mine) for n in self.fakes if n >= 0}
        number.update({n: first + at for at, n in enumerate(mine)})
        sources = [replace(s, fake=self.fakes[n]) for n, s in enumerate(logical.sources)]
        sources += [Source(name, "input", self.fakes[n]) for n, name in mine.items()]
        made = replace(logical.map(number), sources=tuple(sources))
        self.check_losses(made)
        told = [(name, self.new[n]) for n, name in mine.items()]
        before = zip(ends_of(whole), ends_of(made), strict=True)
        return Micro(
            made,
            tuple(replace(what, name=name) for name, what in told if isinstance(what, Known)),
            tuple(what._replace(name=name) for name, what in told if isinstance(what, Share)),
            tuple(name for name, what in told if what is None),
            {theirs: states[n] for n, theirs in before},
            tuple(self.drawn),
        )

    def check_losses(self, micro: Logical) -> None:
        """Refuse a loss in which some micro-batch has no part, because all of it is of samples that others own."""
        makers = {n: op for op in self.logical.ops for n in op.numbers}
        for whole, loss in zip(self.logical.losses, micro.losses, strict=True):
            if self.made.owner and whole.number in self.logical.wants_grad and loss.number not in micro.wants_grad:
                line = makers[whole.number].origin.line or "no line"
                raise SbpError(
                    f"the loss at {line} has nothing of the samples of micro-batch {self.k}\n"
                    "  leave micro_batches= out, or have all samples in it"
                )
