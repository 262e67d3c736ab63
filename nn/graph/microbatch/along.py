"""Time as an axis of the rule book: how every value of a step lies along its micro-batches, and slices of sequences.

A micro-batch is a rank at another time, and holds a run of samples. The step is captured once, for the whole batch, and
the book is asked op by op, with a rank for each sample (and for each token of a sequence, where these are cut):

    S(d)   a piece along a dim: arguments, and what is made of them sample by sample
    B      the same in every micro-batch: weights, of which the gradient is P
    P      an addend: losses, and what follows from them linearly

As where ranks are places, an op runs in the cheapest of its ways; but nothing is sent from one time to another. Values
of arguments alone may be made of the whole batch, before the step. All others stay as they are; or are cut where they
are whole; or made addends where they are whole, by the micro-batch's share.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ....placement import Placement
from ....placement.errors import SbpError
from ....sbp.call import Call, Ref, Way, fill, frozen
from ....sbp.choose import all_ways, divides, everywhere
from ....sbp.joint.options import answer_of
from ....sbp.logical import Logical, LogicalOp, Loss
from ....sbp.state import Factors, Runs, State
from ....sbp.traits import traits
from ..choose.decompose import expand, in_line, looks
from .needs_all import NeedsAll, needs_all
from .owned_samples import OwnedSamples, refuse_owned
from .row_facts import RowFacts
from .sample_parts import SampleParts
from .sorted_rows import SortedRows
from .whole_batch import WholeBatch, handed_over, whole_batch

__all__ = ["TOKENS", "Along", "Change", "along"]

SAMPLES, TOKENS = 0, 1  # the axes
CUT, SHARE, BEFORE = 1, 2, 10  # prices of cutting, of weighing, and of making a value before the step
WHOLE, ALL_WORK = 5, 10**6  # prices of using all samples in every micro-batch, and of doing only that, which is refused
ATTENTION = "scaled_dot_product_attention"
TENSORS = {
    "add.Scalar": torch.ops.aten.add.Tensor,
    "sub.Scalar": torch.ops.aten.sub.Tensor,
    "rsub.Scalar": torch.ops.aten.rsub.Tensor,
}


class Change(NamedTuple):
    """The dims of a whole value that are cut, and the axes along which it becomes an addend."""

    cut: tuple[int, ...]
    share: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Along:
    """A step along time: how each value lies, and the way of each op.

    `given` are values of arguments, constants and buffers alone. `attends` has attention of slices that looks back, and
    for each the number of its mask; `masks` how these are cut. `scatters` are results of ops that put what samples
    have into places that a mask says, and `owner` has the micro-batch that alone has a value.
    """

    logical: Logical
    runs: Runs
    states: Mapping[int, State]
    ways: tuple[Way, ...]
    given: frozenset[int]
    attends: Mapping[int, int | None] = field(default_factory=dict)
    masks: Mapping[int, State] = field(default_factory=dict)
    scatters: frozenset[int] = frozenset()
    owner: Mapping[int, int] = field(default_factory=dict)
    whole: WholeBatch | None = None  # what is done behind all forwards


def along(
    logical: Logical,
    runs: Runs,
    dims: Mapping[str, tuple[Factors, ...]],
    end: Placement | None = None,
    *,
    waits: bool = False,
) -> Along:
    """A captured step along time, in such runs; `dims` says which axes cut each argument. Where the schedule `waits`,
    all micro-batches have gone forward before one goes back: what needs all of them at once is done between, at the
    `end` of the step."""
    asked = _Asked(expand(logical, lambda op: 2), runs, dims, end, waits)
    for op in asked.logical.ops:
        asked.put(op)
    whole = asked.handed_over() if asked.late else None
    asked.sorted.refuse_ends(asked.logical.ends)
    refuse_owned(asked.logical, asked.owned.owner)
    made = replace(asked.logical, ops=tuple(asked.ops))
    given, scatters = frozenset(asked.given), frozenset(asked.scatters)
    ways, owner = tuple(asked.ways), asked.owned.owner
    return Along(made, runs, asked.states, ways, given, asked.attends, asked.masks, scatters, owner, whole)


def change(have: State, to: State) -> Change | None:
    """The change of a value from one state into another; None where that takes other micro-batches."""
    cut = tuple(d for d, (before, after) in enumerate(zip(have.dims, to.dims, strict=True)) if before != after)
    share = tuple(axis for axis in to.partial if axis not in have.partial)
    sums = to.reduction == (have.reduction if have.partial else "sum") or not to.partial
    if any(have.dims[d] for d in cut) or not set(have.partial) <= set(to.partial) or not sums:
        return None
    return None if share and to.reduction != "sum" else Change(cut, share)


def drawn(op: LogicalOp, call: Call) -> Way | None:
    """The way of numbers that are drawn for samples, like a tensor of which nothing is read."""
    if not op.draws_unread or len(op.inputs) != 1 or len(op.numbers) != 1 or not call.states[0].split:
        return None
    return Way(call.states, (State(call.states[0].dims),))


class _Asked:
    """The book, asked op by op."""

    def __init__(
        self,
        logical: Logical,
        runs: Runs,
        dims: Mapping[str, tuple[Factors, ...]],
        end: Placement | None,
        waits: bool,
    ) -> None:
        self.logical, self.runs, self.end = logical, runs, end
        self.waits = waits and len(runs.lengths) == 1
        self.late: list[LogicalOp] = []  # ops that need all micro-batches, and those that use what these make
        self.late_values: set[int] = set()
        self.late_by: SbpError | None = None  # why the first of them does
        self.sizes = tuple(n if len(each) > 1 else 1 for n, each in zip(runs.sizes, runs.lengths, strict=True))
        self.fakes = dict(logical.fakes)
        self.ops: list[LogicalOp] = []
        self.ways: list[Way] = []
        self.states: dict[int, State] = {}
        self.given: set[int] = set()
        self.sampled: set[int] = set()  # given values that have something of each sample
        self.attends: dict[int, int | None] = {}
        self.masks: dict[int, State] = {}
        self.scatters: set[int] = set()
        self.causes: dict[int, LogicalOp] = {}  # by addends, the op that made the first of them
        self.counts: set[int] = set()  # counts: whole numbers of which none is below 0, so no sum of them cancels
        self.chosen: dict[Hashable, Way] = {}  # by all that a choice looks at: equal layers have equal calls
        self.facts = RowFacts(self.fakes)
        self.sorted = SortedRows(self.facts, self.given, self.moved)
        self.parts = SampleParts(runs)
        self.owned = OwnedSamples(self.logical, runs, self.given, self.moved)
        for n, source in enumerate(logical.sources):
            cut = dims.get(source.name, ()) if source.kind == "input" else ()
            cut = tuple(tuple(axis for axis in factors if self.sizes[axis] > 1) for factors in cut)
            self.states[n] = State(cut or ((),) * source.fake.ndim)
            if source.kind != "parameter" and not source.requires_grad and source.name not in logical.writes:
                self.given.add(n)
                self.sampled.update([n] if self.states[n].split else [])

    def put(self, op: LogicalOp) -> None:
        """Ask of an op, or leave it for behind all forwards."""
        if self.late_values.isdisjoint(op.inputs):
            try:
                self.ask(op)
                return
            except NeedsAll as error:
                if not self.waits:
                    raise
                self.late_by = self.late_by or error
        assert self.late_by is not None
        draws = op.draws or (op.is_part and op.op.call.draws)  # type: ignore[attr-defined]  # a part
        if draws or (op.placement not in (None, self.end) and self.end is not None):
            raise self.late_by
        self.late.append(op)
        self.late_values.update(op.numbers)

    def handed_over(self) -> WholeBatch:
        """The ops that are done behind all forwards. What they use becomes results of micro-batches, and losses where
        gradients come back to it."""
        assert self.late_by is not None
        step, handed, known = self.logical, dict[int, Tensor](), dict[int, Tensor]()
        given = any(loss.gradient is not None for loss in step.losses)
        if given or not self.late_values.isdisjoint(step.writes.values()):
            raise self.late_by
        new: list[int] = []
        for op in self.late:
            for n in op.inputs:
                if n in self.late_values or n in handed:
                    continue
                if n in self.given:
                    known[n] = self.fakes[n]
                    continue
                state = self.states[n]
                if (state.partial and state.reduction != "sum") or n in self.owned.owner:
                    raise self.late_by
                handed[n] = self.fakes[n]
                new.append(max(self.fakes) + 1)
                self.record(handed_over(n, self.fakes[n], new[-1], op, self.end), Way((state,), (state,)))
        whole, losses = whole_batch(replace(step, ops=tuple(self.ops)), self.late, handed, known, self.end)
        seeded = tuple(Loss(new[at]) for at in whole.wants)
        result = tuple(Ref(n) for n in (*whole.early, *new))
        self.logical = replace(step, result=result, losses=(*losses, *seeded))
        return whole

    def ask(self, op: LogicalOp) -> None:
        if op.is_part:
            way = self.parts.way(op, self.call(op))
            if way is None:
                raise self.parts.refused(op)
            self.record(op, way)
            return
        op = self.of_tensors(op)
        call = self.call(op)
        plain = torch.Tag.nondeterministic_seeded not in op.op.tags
        given = plain and (all(n in self.given for n in op.inputs) or bool({"like", "new"} & traits(call.name)))
        way = self.attention(op, call) or self.sorted.way(op, call) or drawn(op, call) or self.scatter(op, call)
        way = way or self.owned.way(op, call) or self.cheapest(op, call)
        self.record(op, way)
        self.facts.see(op, call)
        if given:
            self.given.update(op.numbers)
            most = max((self.fakes[n].numel() for n in op.inputs if n in self.sampled), default=0)
            for n, y, state in zip(op.numbers, op.outputs, way.outputs, strict=True):
                if most and (state.split or (not state.partial and 2 * y.numel() > most)):
                    self.sampled.add(n)

    def record(self, op: LogicalOp, way: Way) -> None:
        self.ops.append(op)
        self.ways.append(way)
        self.states.update(zip(op.numbers, way.outputs, strict=True))
        self.fakes.update(zip(op.numbers, op.outputs, strict=True))
        first = next((self.causes[n] for n in op.inputs if n in self.causes), op)
        sums = (n for n, state in zip(op.numbers, way.outputs, strict=True) if state.partial)
        self.causes.update(dict.fromkeys(sums, first))
        if self.is_count(op):
            self.counts.update(op.numbers)

    def is_count(self, op: LogicalOp) -> bool:
        """Whether an op counts, or adds counts up, or takes a multiple of them."""
        kind, numbers = op.name.partition(".")[0], [*op.args, *op.kwargs.values()]
        if kind == "histc":
            return True
        if kind in ("sum", "count_nonzero") and self.fakes[op.inputs[0]].dtype is torch.bool:
            return True
        part = any(isinstance(n, int | float) and (n < 0 or n % 1 != 0) for n in numbers)  # also of inf and nan
        adds = (kind in ("add", "mul") and not part) or kind in ("sum", "cumsum", "to", "_to_copy")
        return adds and bool(op.inputs) and self.counts.issuperset(op.inputs)

    def call(self, op: LogicalOp) -> Call:
        states = tuple(self.states[n] for n in op.inputs)
        fakes, (y, *_) = self.fakes, op.outputs
        if counts := {n for n in op.inputs if n in self.counts and self.states[n].partial and y.dtype != torch.bool}:
            fakes = {n: x.to(y.dtype) if n in counts else x for n, x in fakes.items()}  # as exact as any sum of floats
        return Call(op.op, fill(op.args, fakes), fill(op.kwargs, fakes), op.outputs, states, self.sizes)

    def of_tensors(self, op: LogicalOp) -> LogicalOp:
        """The op with a tensor in the place of a number that it adds to addends, of which each takes its share."""
        call, (y, *_) = self.call(op), op.outputs
        numbers = {name: n for name in ("self", "other") if isinstance(n := call.bound.get(name), int | float)}
        sums = any(state.partial and state.reduction == "sum" for state in call.states)
        if "shifts" not in traits(call.name) or not numbers or not sums or not y.is_floating_point():
            return op
        new = {**dict(zip(call.bound, op.args, strict=False)), **op.kwargs}
        for name, n in numbers.items():
            number, fake = max(self.fakes) + 1, torch.empty((), dtype=y.dtype, device="meta")
            full, dtype = torch.ops.aten.full.default, {"dtype": y.dtype}
            made = replace(
                op, op=full, args=([], n), kwargs=dtype, outputs=(fake,), numbers=(number,), grad=False, lies=None
            )
            self.record(made, everywhere(self.call(made)))
            self.given.add(number)
            new[name] = Ref(number)
        args = new.pop("self"), new.pop("other")
        return replace(op, op=TENSORS.get(call.name, op.op), args=args, kwargs=new)

    def cheapest(self, op: LogicalOp, call: Call) -> Way:
        whole = not any(state.split or state.partial for state in call.states)
        if whole and self.sampled.isdisjoint(op.inputs):
            return everywhere(call)
        asked = op.op, frozen(in_line(op)), *(tuple(map(looks, x)) for x in (call.inputs, call.outputs)), call.states
        of_each = [(op.inputs.index(n), n in self.given, n in self.sampled) for n in op.inputs]
        key = *asked, tuple(of_each)
        if key not in self.chosen:
            self.chosen[key] = self.least(op, call)
        return self.chosen[key]

    def least(self, op: LogicalOp, call: Call) -> Way:
        """The way of an op at the least price."""
        ways = all_ways(call, answer_of(call), divides)
        prices = [self.price(op, way) for way in ways]
        if min(prices) >= ALL_WORK:
            raise self.refused(op, call)
        given = all(n in self.given for n in op.inputs)

        def last(at: int) -> tuple[float, bool, bool]:
            """By price, then ways without addends first; given values stay uncut, because they are cut at their use."""
            made = ways[at].outputs
            return prices[at], any(y.partial for y in made), given and any(y.split for y in made)

        return ways[min(range(len(ways)), key=last)]

    def price(self, op: LogicalOp, way: Way) -> float:
        total = sum(self.moved(n, to) for n, to in zip(op.inputs, way.inputs, strict=True))
        if total == inf or all(n in self.given for n in op.inputs):
            return total
        whole = sum(
            n in self.sampled and not to.split and not to.partial for n, to in zip(op.inputs, way.inputs, strict=True)
        )
        same = whole and not any(state.split or state.partial for state in way.outputs)
        return total + WHOLE * whole + ALL_WORK * bool(same)

    def moved(self, n: int, to: State) -> float:
        """The price of bringing a value into a state."""
        have, found = self.states[n], change(self.states[n], to)
        floats = self.fakes[n].is_floating_point() or self.fakes[n].is_complex()
        if have == to:
            return 0
        if n in self.given and (found is None or found.cut):
            fits = not to.partial or (floats and to.reduction == "sum")
            return (BEFORE if found is None else CUT) + SHARE * bool(to.partial) if fits else inf
        if found is None or (found.share and not floats):
            return inf
        return CUT * bool(found.cut) + SHARE * bool(found.share)

    def attention(self, op: LogicalOp, call: Call) -> Way | None:
        """Attention of a slice that looks back: the way for samples, with queries cut by tokens."""
        if call.name != ATTENTION or not any(TOKENS in state.split for state in call.states[1:3]):
            return None
        bound, three = call.bound, call.states[:3]
        mask = op.inputs[3] if bound["attn_mask"] is not None else None
        back = bound["is_causal"] if mask is None else not bound["is_causal"] and mask in self.given
        if not back or any(state.dims[-2] != (TOKENS,) for state in three):
            return None
        states = [state._replace(dims=(*state.dims[:-2], (), state.dims[-1])) for state in three]
        if mask is not None:
            shape, samples = self.fakes[mask].shape, self.sizes[SAMPLES]
            if shape[-2:] != (self.sizes[TOKENS],) * 2:
                return None
            dims: list[Factors] = [()] * len(shape)
            dims[:1] = [(SAMPLES,)] if len(shape) == bound["query"].ndim and 1 < samples == shape[0] else dims[:1]
            states.append(State(tuple(dims)))
            self.masks[mask] = State((*dims[:-2], (TOKENS,), ()))
        alone = replace(call, states=tuple(states), sizes=(*self.sizes[:TOKENS], 1))
        ways = (way for way in all_ways(alone, answer_of(alone), divides) if way.inputs == alone.states)
        found = next(ways, None)
        if found is None or found.outputs[0].partial:
            return None
        self.attends[op.numbers[0]] = mask
        (out,) = found.outputs
        return Way(call.states, (State((*out.dims[:-2], (TOKENS,), out.dims[-1])),))

    def scatter(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of an op that puts what samples have into places of theirs, as each step sees of the mask."""
        if call.name != "masked_scatter" or len(self.sizes) > 1 or op.inputs[1] not in self.given:
            return None
        x, mask = call.inputs[:2]
        states = [State(((SAMPLES,), *[()] * (y.ndim - 1))) for y in call.inputs if y.ndim]
        rows = len(states) == 3 and len(x) == len(mask) == self.sizes[0] and mask.ndim == x.ndim
        if not rows or call.states[2] != states[2] or self.moved(op.inputs[0], states[0]) == inf:
            return None
        self.scatters.add(op.numbers[0])
        return Way(tuple(states), (states[0],))

    def refused(self, op: LogicalOp, call: Call) -> NeedsAll:
        """An op that cannot be done for a micro-batch alone."""
        causes = {id(made): made for n in op.inputs if (made := self.causes.get(n)) is not None}
        return needs_all(op, call, tuple(causes.values()))
