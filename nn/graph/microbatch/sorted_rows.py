"""Rows that a micro-batch sorts for itself, as layers of experts do with tokens, and puts back by the order it found.

A sort of all rows mixes samples, and so does every value in its order, until it goes back. What a micro-batch holds of
such a value is of its own rows, in an order of its own, so that nothing may be done but what treats all rows alike:

    order = keys.argsort()                        Picks: numbers of rows, in order; `order // k` of groups of k rows,
                                                  and `order % k` is InOrder
    x[order // k]                                 InOrder: rows that were put in that order, one by one
    grouped_mm(InOrder, weights, offs=ends)       InOrder: each row times the weight of its key; `ends` are sums so far
                                                  of how many keys are 0, 1, and so on
    place[order] = arange(len(order))             Places: where each row went; `order.argsort()` is the same
    InOrder[Places], out.index_add(0, Picks, InOrder)     rows as they were, which are cut by samples as always

With F a function of rows, p the order of all and q that of a micro-batch's, InOrder is F after p for the batch, and F
after q for a micro-batch. A line above holds for every F, p and q. All else that reads such a value is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ....placement.errors import SbpError
from ....sbp.call import NEVER, Call, Match, Ref, Rewritten, Way
from ....sbp.choose import way_by
from ....sbp.joint.options import answer_of
from ....sbp.logical import LogicalOp
from ....sbp.state import Factors, State
from ....sbp.traits import traits
from .row_facts import RowFacts

__all__ = ["SortedRows"]

SORTS = ("sort", "sort.stable", "argsort", "argsort.stable")
BLIND = ("squeeze", "repeat_interleave")  # whose local functions look at shapes, and at no places


@dataclass(frozen=True, eq=False)
class Sort:
    """A sort of rows along time: how they are cut, how many there are, and how many in a piece of one sample."""

    op: LogicalOp
    cut: Factors
    size: int
    each: int
    keys: int  # a value with the same entries
    ascends: bool


@dataclass(frozen=True)
class InOrder:
    """Rows along `dim` in the order of a sort."""

    sort: Sort
    dim: int


@dataclass(frozen=True)
class Picks:
    """The numbers of the rows in the order of a sort, or of the groups of `per` rows that they are of."""

    sort: Sort
    dim: int
    per: int = 1


@dataclass(frozen=True)
class Places:
    """For each row its place in the order of a sort."""

    sort: Sort
    dim: int


Told: TypeAlias = InOrder | Picks | Places
Ordered: TypeAlias = tuple[Way, list[Told | None]] | None


class _Index(NamedTuple):
    """The dim of a tensor that an index is of, and whether the index is a line; what is written where, if anything."""

    dim: int
    line: bool = True
    adds: bool = False


class SortedRows:
    """Values in the order of a sort. `cost` is that of a value in another state, infinity where it cannot be had."""

    def __init__(self, facts: RowFacts, given: set[int], cost: Callable[[int, State], float]) -> None:
        self.facts, self.given, self.cost = facts, given, cost
        self.told: dict[int, Told] = {}

    def way(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of an op that sorts rows of samples, or reads such an order; None if it does neither."""
        told = [self.told.get(n) for n in op.inputs]
        if not any(told):
            return self.sorts(op, call) if call.name in SORTS else None
        if {"like", "new"} & traits(call.name):
            return None
        found = self.numbers(op, call, told) or self.taken(op, call, told) or self.put(op, call, told)
        found = found or self.product(op, call, told) or self.alike(op, call, told)
        if found is None or any(self.cost(n, to) == inf for n, to in zip(op.inputs, found[0].inputs, strict=True)):
            raise self.refused(f"{call.name} at {op.origin.line or 'no line'}", told)
        way, made = found
        self.told.update({n: each for n, each in zip(op.numbers, made, strict=True) if each is not None})
        return way

    def refuse_ends(self, ends: Iterable[int]) -> None:
        """Refuse what a step would give back in such an order."""
        if told := [self.told[n] for n in ends if n in self.told]:
            raise self.refused("a result, or a buffer,", told)

    def sorts(self, op: LogicalOp, call: Call) -> Way | None:
        """A sort of a line of keys that is cut by samples."""
        (state,), x = call.states, call.inputs[0]
        if len(call.sizes) != 1 or op.inputs[0] in self.given or x.ndim != 1 or not state.dims[0] or state.partial:
            return None
        each = x.shape[0] // prod(-f if f < 0 else call.sizes[f] for f in state.dims[0])
        keys, ascends = self.facts.root(op.inputs[0]), not call.bound["descending"]
        sort = Sort(op, state.dims[0], x.shape[0], each, keys, ascends)
        if len(op.numbers) == 2:
            self.told[op.numbers[0]] = InOrder(sort, 0)
            self.facts.roots[op.numbers[0]] = keys
        self.told[op.numbers[-1]] = Picks(sort, 0)
        return Way((state,), (state,) * len(op.numbers))

    def numbers(self, op: LogicalOp, call: Call, told: Sequence[Told | None]) -> Ordered:
        """Numbers of groups of rows, and of rows in their groups; and the places of rows."""
        picks, state = told[0], call.states[0]
        if not isinstance(picks, Picks) or len(told) != 1:
            return None
        if call.name in ("argsort", "argsort.stable") and picks.per == call.inputs[0].ndim == 1:
            return None if call.bound["descending"] else (Way((state,), (state,)), [Places(picks.sort, 0)])
        per = call.bound.get("other")
        if not isinstance(per, int) or per < 1 or picks.sort.each % (picks.per * per):
            return None
        way = Way((state,), (state,))
        if call.name == "floor_divide" or call.bound.get("rounding_mode") == "floor":
            return way, [replace(picks, per=picks.per * per)]
        return (way, [InOrder(picks.sort, picks.dim)]) if call.name == "remainder.Scalar" else None

    def taken(self, op: LogicalOp, call: Call, told: Sequence[Told | None]) -> Ordered:
        """Rows that are taken by their numbers, or put back by their places."""
        at = _index(call)
        if at is None or len(told) != 2:
            return None
        (x, index), (_, numbers) = told, call.inputs
        rows: Told | None = None
        if isinstance(index, Picks) and x is None:
            rows = InOrder(index.sort, at.dim)
            if call.inputs[0].shape[at.dim] * index.per != index.sort.size:
                return None
        elif not isinstance(index, Places) or x != InOrder(index.sort, at.dim):
            return None
        if index.dim != (0 if at.line else at.dim) or (at.line and numbers.ndim != 1):
            return None
        cut = [_cut(y.ndim, at.dim, index.sort.cut) for y in (call.inputs[0], call.outputs[0])]
        return Way((cut[0], call.states[1]), (cut[1],)), [rows]

    def put(self, op: LogicalOp, call: Call, told: Sequence[Told | None]) -> Ordered:
        """Rows that are put where their numbers say, or added there; and the places of rows."""
        at = _put_index(call)
        if at is None or len(told) != 3:
            return None
        (x, index, source), (into, numbers, values) = told, call.inputs
        if x is not None or not isinstance(index, Picks) or index.dim != (0 if at.line else at.dim):
            return None
        if into.shape[at.dim] * index.per != index.sort.size or (at.line and numbers.ndim != 1):
            return None
        rows = _cut(into.ndim, at.dim, index.sort.cut)
        way = Way((rows, *call.states[1:]), (rows,))
        if source == InOrder(index.sort, at.dim) and values.ndim == into.ndim and (at.adds or index.per == 1):
            return way, [None]
        line = op.inputs[2] in self.facts.lines and values.shape == into.shape == numbers.shape
        if line and not at.adds and index.per == 1:
            return replace(way, local=PLACES), [Places(index.sort, 0)]
        return None

    def product(self, op: LogicalOp, call: Call, told: Sequence[Told | None]) -> Ordered:
        """Rows times the matrix of their key, where groups are as long as there are keys of each."""
        if call.name != "_grouped_mm" or len(op.inputs) != 3 or call.bound["offs"] is None:
            return None
        (rows, weights, _), (_, matrices, _) = told, call.inputs
        ends = self.facts.counts.get(op.inputs[2])
        if not isinstance(rows, InOrder) or rows.dim or weights is not None or matrices.ndim != 3 or ends is None:
            return None
        sort = rows.sort
        known = ends.ended and ends.keys == sort.keys and ends.groups == len(matrices) and sort.ascends
        if not known or not self.facts.within(sort.keys, ends.groups):
            return None
        return Way((call.states[0], _cut(3, 0, ()), call.states[2]), (_cut(2, 0, sort.cut),)), [rows]

    def alike(self, op: LogicalOp, call: Call, told: Sequence[Told | None]) -> Ordered:
        """An op of which the rule book says that a piece of the rows makes its piece of the result, or an addend of it:
        a single row too, so that it does the same to each, in whatever order they are."""
        tagged = {i: x for i, x in enumerate(told) if x is not None}
        first, *others = tagged.values()
        answer = answer_of(call)
        match = answer.alone or answer if isinstance(answer, Match) else _of_each_row(call, first)
        if match is None or any(x.sort is not first.sort for x in others):
            return None
        factors = {match.inputs[i][x.dim] for i, x in tagged.items()}
        factor = factors.pop()
        seen = factor in match.shared or any(f == factor for _, f in match.windows)
        looks = match.local is not None and factor not in match.unread
        looks = looks and "spread" not in traits(call.name) and call.name.partition(".")[0] not in BLIND
        if factors or factor == NEVER or seen or looks:
            return None
        rows = [n for i, n in enumerate(op.inputs) if i not in tagged and factor in match.inputs[i]]
        way = way_by(call, match, [("split", factor)], lambda f, axes: first.sort.cut)
        if not self.facts.even.issuperset(rows) or way is None:
            return None
        made = [replace(first, dim=dims.index(factor)) if factor in dims else None for dims in match.outputs]
        if all(isinstance(x, InOrder) for x in tagged.values()):
            return way, list(made)
        keeps = {"same", "reshaped", "permuted", "spread"} & traits(call.name) and call.name != "view.dtype"
        whole = call.outputs[0].dtype in (torch.int32, torch.int64)
        return (way, list(made)) if len(told) == 1 and keeps and whole and None not in made else None

    def refused(self, asked: str, told: Sequence[Told | None]) -> SbpError:
        op = next(x for x in told if x is not None).sort.op
        return SbpError(
            f"{asked} needs more than one micro-batch at once\n"
            f"  it reads rows in the order of {op.name} at {op.origin.line or 'no line'}, and each micro-batch has an "
            "order of its own\n"
            "  do the same to each row until they are back, as by x[order.argsort()] or out.index_add(0, order, x); "
            "F.grouped_mm takes as offs the cumsum of torch.histc(keys, bins=n, min=0, max=n - 1), of keys of topk, "
            "argmax or clamp(0, n - 1); or leave micro_batches= out"
        )


def _cut(ndim: int, dim: int, factors: Factors) -> State:
    return State(tuple(factors if d == dim else () for d in range(ndim)))


def _index(call: Call) -> _Index | None:
    """How an op reads a tensor by one index."""
    x = call.inputs[0]
    if call.name == "index.Tensor":
        dims = [d for d, index in enumerate(call.bound["indices"]) if index is not None]
        return _Index(dims[0]) if len(dims) == 1 else None
    if call.name in ("index_select", "gather") and x.ndim:
        return _Index(call.bound["dim"] % x.ndim, line=call.name == "index_select")
    return None


def _put_index(call: Call) -> _Index | None:
    """How an op writes to a tensor by one index."""
    x, name = call.inputs[0], call.name
    if name == "index_put":
        dims = [d for d, index in enumerate(call.bound["indices"]) if index is not None]
        return _Index(dims[0], adds=call.bound["accumulate"]) if len(dims) == 1 else None
    if name in ("index_add", "index_copy", "scatter.src", "scatter_add") and x.ndim:
        return _Index(call.bound["dim"] % x.ndim, name.startswith("index"), name.endswith("add"))
    return None


def _of_each_row(call: Call, told: Told) -> Match | None:
    """The match of a view of each row."""
    (x, *_), (y, *_) = call.inputs, call.outputs
    views = len(call.inputs) == 1 and "reshaped" in traits(call.name) and call.name != "view.dtype"
    if not views or told.dim or not y.ndim or y.shape[0] != x.shape[0] or 0 in x.shape:
        return None
    ins, outs = (0, *[NEVER] * (x.ndim - 1)), (0, *[NEVER] * (y.ndim - 1))
    local = Rewritten(lambda piece, x, *args, **kwargs: (torch.Tensor.reshape, (x, piece.shape())))
    return Match((ins,), (outs,), (x.shape[0],), hollow=True, local=local, unread=frozenset({0}))


def _places(into: Tensor, order: Tensor) -> Tensor:
    return order.argsort().to(into.dtype)


PLACES = Rewritten(lambda piece, *args, **kwargs: (_places, (Ref(0), Ref(1))))
