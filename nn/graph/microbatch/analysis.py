"""Analysis of a step by the rule book: which part of the batch's value every value of a micro-batch is.

Where it says nothing of an op on arguments alone, the result is known before the step: made of the batch, and cut.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....placement.errors import SbpError
from ....sbp.call import Match
from ....sbp.joint.options import answer_of
from ....sbp.logical import Logical, LogicalOp
from ....sbp.state import Factors, State
from ....sbp.traits import VIEWS, traits
from .align import name_of
from .parts import Axes, Part, part_of_rule

__all__ = ["FILLED", "Analysis", "Counted"]

FILLED = {"zeros_like": 0, "ones_like": 1}
DRAWN = {"sbpflow::packed_noise"}  # by lengths: every micro-batch has numbers of its own
ATTENTION = "scaled_dot_product_attention"
TOKENS = 1  # the axis of


class Counted(Exception):
    """Numbers of samples that something computes with, so that they must be those of the batch."""

    def __init__(self, number: int) -> None:
        self.number = number


class Analysis:
    """The parts of all values of the batch's step, op by op, and which of them are known before it.

    `cuts` are those, by which axes their dims are cut; `picked` rows of weights, from where on; `attends` attention of
    slices, with the number of its mask. `masks` are the cuts of these. `shares` are inputs of an op, by place, that are
    to be multiplied by the micro-batch's share along some axes.
    """

    def __init__(self, logical: Logical, axes: Axes, counted: set[int]) -> None:
        self.logical, self.axes, self.counted = logical, axes, counted
        self.parts: dict[int, Part] = {}
        self.given: set[int] = set()  # values that depend on inputs and buffers alone
        for n, source in enumerate(logical.sources):
            dims = axes.inputs.get(source.name, ()) if source.kind == "input" else ()
            dims = dims or ((),) * source.fake.ndim
            cut = [axis for factors in dims for axis in factors]
            odd = len(set(cut)) < len(cut)  # by one axis twice, as a mask of all tokens for all
            self.parts[n] = Part(State(((),) * len(dims) if odd else dims), odd=odd)
            if source.kind != "parameter" and not source.requires_grad and source.name not in logical.writes:
                self.given.add(n)
        self.cuts: dict[int, tuple[Factors, ...]] = {}
        self.picked: dict[int, int] = {}
        self.attends: dict[int, int | None] = {}
        self.masks: dict[int, tuple[Factors, ...]] = {}
        self.shares: dict[int, dict[int, tuple[int, ...]]] = {}
        self.causes: dict[int, LogicalOp] = {}  # of what no micro-batch has a part of, the op that made it so
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
            totals = [Part(State(part.state.dims)) if at in needed else part for at, part in enumerate(parts)]
            found = self.of(op, mine, totals) if needed else None
        if found is None:
            needed, found = (), self.weighed(op, mine, parts) or self.known(op, mine)
        if found is None:
            raise self.unknown(op)
        self.parts.update(zip(op.numbers, found, strict=True))
        cause = next((self.causes[n] for n in op.inputs if n in self.causes), op)
        self.causes.update({n: cause for n, part in zip(op.numbers, found, strict=True) if part.odd})
        if self.plain(op):
            self.given.update(op.numbers)
        return found, needed

    def plain(self, op: LogicalOp) -> bool:
        """Whether an op's results depend on inputs and buffers alone."""
        of_given = all(n in self.given for n in op.inputs) or name_of(op) in FILLED
        return of_given and torch.Tag.nondeterministic_seeded not in op.op.tags

    def of(self, op: LogicalOp, mine: LogicalOp | None, parts: Sequence[Part]) -> list[Part] | None:
        """The parts that an op makes of such parts; None where that takes more than one micro-batch."""
        if name_of(op) == ATTENTION and any(part.dim(TOKENS) is not None for part in parts[1:3]):
            return self.attention(op, mine, parts)
        if any(part.odd for part in parts):
            return None
        rows = next((part.rows for part in parts if part.rows is not None), None)
        if rows is not None:
            return self.indexed(op, parts, rows)
        if "like" in traits(name_of(op)):
            return [Part(State(parts[0].state.dims))]
        if name_of(op) == "repeat_interleave.self_int" and mine is not None and not parts[0].state.partial:
            bound = self.logical.call(op).bound  # of whole samples: there are as many more, next to each other
            if (
                not parts[0].whole
                and bound["dim"] is not None
                and not any(f < 0 for factors in parts[0].state.dims for f in factors)
            ):
                return [Part(parts[0].state)]
        if all(part.whole for part in parts) or "new" in traits(name_of(op)) or name_of(op) in DRAWN:
            fresh = [self.fresh(op, y, None if mine is None else mine.outputs[at]) for at, y in enumerate(op.outputs)]
            return None if any(part.odd for part in fresh) and self.plain(op) else fresh
        states = tuple(part.state for part in parts)
        call = replace(self.logical.call(op), states=states, sizes=self.axes.sizes)
        answer = answer_of(call)
        if isinstance(answer, Match):
            made = part_of_rule(call, answer, parts)
            if made is not None:
                return made
        ways: Sequence[Any] = answer.also if isinstance(answer, Match) else answer or ()
        avg = frozenset(axis for part in parts for axis in part.avg)
        for way in ways:
            if way.inputs == states:
                return [Part(state, avg.intersection(state.partial)) for state in way.outputs]
        return None

    def attention(self, op: LogicalOp, mine: LogicalOp | None, parts: Sequence[Part]) -> list[Part] | None:
        """Attention of a slice that looks back: what the rule says of samples, and queries cut by tokens."""
        bound = self.logical.call(op).bound
        mask = op.inputs[3] if bound["attn_mask"] is not None else None
        ends = {len(part.state.dims) - 2 - (part.dim(TOKENS) or 0) for part in parts[:3]}
        back = bound["is_causal"] if mask is None else not bound["is_causal"] and mask in self.given
        if mine is None or ends != {0} or not back:
            return None
        plain = [_without(part, TOKENS) for part in parts[:3]]
        if mask is not None:
            theirs, ours = self.logical.fakes[mask], bound["query"].shape
            if theirs.shape[-2:] != (self.axes.sizes[TOKENS],) * 2:
                return None
            cut: list[Factors] = [()] * theirs.ndim
            if theirs.ndim == len(ours) and self.axes.sizes[0] == theirs.shape[0] != self.axes.small[0]:
                cut[0] = (0,)
            plain.append(Part(State(tuple(cut))))
            cut[-2] = (TOKENS,)
            self.masks[mask] = tuple(cut)
        found = self.of(op, mine, plain)
        if found is None or found[0].state.partial:
            return None
        self.attends[op.numbers[0]] = mask
        dims = found[0].state.dims
        return [Part(State((*dims[:-2], (TOKENS,), dims[-1])))]

    def indexed(self, op: LogicalOp, parts: Sequence[Part], rows: int) -> list[Part] | None:
        """The parts that an op makes of the numbers of samples: the same seen otherwise, or the samples they number."""
        name = name_of(op)
        if len(parts) == 1 and (name == "slice.Tensor" or traits(name) & (VIEWS - {"cut"})):
            found = self.of(op, None, [parts[0]._replace(rows=None)])
            return None if found is None else [part._replace(rows=rows) for part in found]
        x, *others = parts
        indices = list(op.args[1]) if name == "index.Tensor" else []
        if x.rows is None and indices and None not in indices and others[0].rows is not None:
            (axis,) = others[0].state.split
            dims, end = others[0].state.dims, op.outputs[0].ndim
            shapes = [self.logical.fakes[n].ndim for n in op.inputs[1:]]
            place = max(shapes) - len(dims) + dims.index((axis,))
            more = [(part, max(shapes) - len(part.state.dims)) for part in others[1:] if not part.whole]
            fits = all(part.state.split == {axis} and part.dim(axis) == place - short for part, short in more)
            if fits and x.state.dims[0] == (axis,) and x.state.split == {axis}:
                return [Part(State(tuple((axis,) if d == place else () for d in range(end))))]
        raise Counted(rows)

    def fresh(self, op: LogicalOp, y: Tensor, mine: Tensor | None) -> Part:
        """The parts of what is made of whole values: whole, unless it measures what the batch does."""
        name = name_of(op).partition(".")[0]
        even = traits(name) & {"even", "spread", "like", "new"}  # they make a dim of the batch's size of nothing
        whole = Part(State(((),) * y.ndim))
        shape = self.shown(op, y) if mine is None else mine.shape
        if tuple(shape) == tuple(y.shape):
            return whole
        dims = self.axes.dims(y.shape, shape, tokens=not self.plain(op))  # samples have no rows of a weight
        if dims is None and even:
            dims = self.axes.longer(y.shape, shape)
        if dims is None:
            return whole._replace(odd=True)
        number = op.numbers[0]
        part = Part(State(dims))
        if name == "arange" and not op.inputs and number not in self.counted and dims in (((0,),), ((TOKENS,),)):
            return part._replace(rows=number)
        if (even and self.even(op, y, dims)) or torch.Tag.nondeterministic_seeded in op.op.tags:
            return part
        start = self.picks(op, dims)
        if start is not None:
            self.picked[number] = start
            return part
        return whole._replace(odd=True)

    def even(self, op: LogicalOp, y: Tensor, dims: tuple[Factors, ...]) -> bool:
        """Whether all samples have the same of a tensor that an op makes: of a repeated one, as often all of it, or its
        only row."""
        name = name_of(op).partition(".")[0]
        if name not in ("repeat", "tile", "repeat_interleave"):
            return True
        x = self.logical.fakes[op.inputs[0]]
        for factors, of, n in zip(dims[::-1], y.shape[::-1], x.shape[::-1], strict=False):
            rows_apart = name == "repeat_interleave" or len(factors) > 1
            if factors and n > 1 and (rows_apart or of // n % self.axes.sizes[factors[0]]):
                return False
        return True

    def shown(self, op: LogicalOp, y: Tensor) -> list[int]:
        """The shape that an op of the batch would have in a micro-batch, where there is no need for it."""
        if name_of(op).partition(".")[0] != "expand":
            return list(y.shape)
        x = self.logical.fakes[op.inputs[0]]
        before = [1] * (y.ndim - x.ndim) + list(x.shape)
        less = dict(zip(self.axes.sizes, self.axes.small, strict=True))
        return [less.get(n, n) if n != was else n for n, was in zip(y.shape, before, strict=True)]

    def picks(self, op: LogicalOp, dims: tuple[Factors, ...]) -> int | None:
        """Where the rows of a weight begin of which an op takes as many as there are tokens or samples."""
        if name_of(op) != "slice.Tensor":
            return None
        bound = self.logical.call(op).bound
        at = bound["dim"] % len(dims)
        single = bound["step"] == 1 and [d for d, factors in enumerate(dims) if factors] == [at] and len(dims[at]) == 1
        start = bound["start"] or 0
        return int(start) if single and start >= 0 else None

    def weighed(self, op: LogicalOp, mine: LogicalOp | None, parts: Sequence[Part]) -> list[Part] | None:
        """A sum and what is none, added: a mean, or what is the same for all, is a sum if each part has its share."""
        axes = {axis for part in parts for axis in part.state.partial if axis not in part.avg}
        if name_of(op) not in ("add.Tensor", "sub.Tensor") or mine is None or not axes:
            return None
        lacks = {at: tuple(sorted(axes - ({*part.state.partial} - part.avg))) for at, part in enumerate(parts)}
        sums = [
            Part(
                part.state._replace(partial=tuple(sorted({*part.state.partial, *lacks[at]}))), part.avg - axes, part.odd
            )
            for at, part in enumerate(parts)
        ]
        found = self.of(op, mine, sums)
        if found is not None:
            self.shares[op.numbers[0]] = {at: lack for at, lack in lacks.items() if lack}
        return found

    def known(self, op: LogicalOp, mine: LogicalOp | None) -> list[Part] | None:
        """Values of arguments alone are made of the batch's, and cut; what cannot be cut may be used up later."""
        if not self.plain(op):
            return None
        found = []
        for at, (n, y) in enumerate(zip(op.numbers, op.outputs, strict=True)):
            dims = None if mine is None else self.axes.dims(y.shape, mine.outputs[at].shape)
            if dims is not None:
                self.cuts[n] = dims
            found.append(Part(State(dims or ((),) * y.ndim), odd=dims is None))
        return found

    def unknown(self, op: LogicalOp) -> SbpError:
        """An op that cannot be done for a micro-batch alone."""
        lies = ", ".join(str(self.parts[n]) for n in op.inputs)
        asked = f"{name_of(op)} at {op.origin.line or 'no line'} needs more than one"
        told = f"  it is in {op.origin.module or 'no module'}, and its inputs are of the batch: {lies}\n"
        for cause in {id(made): made for n in op.inputs if (made := self.causes.get(n)) is not None}.values():
            told += f"  {name_of(cause)} at {cause.origin.line or 'no line'} makes one by the number of samples\n"
        if answer_of(self.logical.call(op)) is None:
            return SbpError(
                f"{asked} micro-batch at once, for all that is known: no rule tells what it does to each sample\n{told}"
                f"  leave micro_batches= out, write it by ops that have one, or give it one by flow.rule"
            )
        if len(self.axes.sizes) > 1:
            return SbpError(
                f"{asked} slice or micro-batch at once\n{told}"
                "  tokens may see earlier ones in F.scaled_dot_product_attention, with is_causal=True or such a mask, "
                "without dropout, and nowhere else; or leave slices= out"
            )
        if name_of(op) == "sbpflow::recurrent":
            told += "  a batch is cut along its first dim: give the layer its samples there, and batch_first=True; or\n"
        if name_of(op).startswith("embedding_bag"):
            told += (
                "  words are in a line, and bags begin anywhere: give rows of words, filled up with padding_idx; or\n"
            )
        return SbpError(
            f"{asked} micro-batch at once\n{told}"
            "  leave micro_batches= out, have batch norm in eval(), or write it so that samples do not depend on each "
            "other and the loss is a sum or a mean over them"
        )


def _without(part: Part, axis: int) -> Part:
    """A part as it is along the other axes."""
    dims = tuple(tuple(f for f in factors if f != axis) for factors in part.state.dims)
    return Part(part.state._replace(dims=dims), part.avg)
