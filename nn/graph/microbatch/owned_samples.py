"""Samples that are taken one by one: values that one micro-batch alone has, the others zeros.

    parts = x.unbind(0)                one micro-batch owns each, so that anything may be done to it there
    torch.stack([f(y) for y in parts]) all samples in their order again, which are cut as they were
    parts[0] + parts[5]                of two owners: addends, as a single sample is that is taken by its place

To the rule book such a value is an addend. Micro-batches leave out what others own.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import inf

import torch

from ....placement.errors import SbpError
from ....sbp.call import Call, Way
from ....sbp.logical import Logical, LogicalOp
from ....sbp.state import Runs, State
from ....sbp.traits import traits

__all__ = ["OwnedSamples", "refuse_owned", "taken_from"]

JOINS = ("cat", "concat", "concatenate", "stack")


class OwnedSamples:
    """The micro-batch that owns a value, by number. `cost` is that of a value in another state."""

    def __init__(self, logical: Logical, runs: Runs, given: set[int], cost: Callable[[int, State], float]) -> None:
        self.runs, self.given, self.cost = runs, given, cost
        self.owner: dict[int, int] = {}
        self.takes: dict[int, list[LogicalOp]] = {}  # the ops that may take samples from a value
        for op in logical.ops:
            if len(op.inputs) == 1 and ({"cut"} & traits(op.name) or op.name in ("unbind.int", "select.int")):
                self.takes.setdefault(op.inputs[0], []).append(op)
        self.call = logical.call

    def way(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of an op that takes samples, or is of owned ones; None if it is neither, or has addends of them."""
        owners = {self.owner[n] for n in op.inputs if n in self.owner}
        if len(self.runs.lengths) != 1 or len(self.runs.lengths[0]) == 1 or op.draws:
            return None
        if not owners:
            return self.taken(op, call)
        if call.name in JOINS and all(n in self.owner for n in op.inputs) and (way := self.joined(op, call)):
            return way
        if len(owners) > 1 or {"like", "new"} & traits(call.name):
            return None
        inputs = zip(op.inputs, call.inputs, call.states, strict=True)
        ins = tuple(state if n in self.owner else _whole(x.ndim) for n, x, state in inputs)
        if any(self.cost(n, to) == inf or to.split for n, to in zip(op.inputs, ins, strict=True)):
            return None
        self.owner.update(dict.fromkeys(op.numbers, *owners))
        return Way(ins, tuple(_whole(y.ndim, adds=True) for y in op.outputs))

    def taken(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of an op that takes samples of a micro-batch each, or several of one. Where none of some micro-batch
        are taken, it has zeros for those of others, so that gradients come back to it: the rule book says how."""
        found = taken_from(op, call) if op.inputs and op.inputs[0] not in self.given else None
        if found is None or call.states[0].dims[found[0]] != (0,) or call.states[0].partial:
            return None
        dim, places = found
        each = call.inputs[0].shape[dim] // self.runs.sizes[0]
        others = (taken_from(other, self.call(other)) for other in self.takes.get(op.inputs[0], ()))
        every = {self._of(*place, each) for other in others if other and other[0] == dim for place in other[1]}
        if not every.issuperset(range(len(self.runs.lengths[0]))):
            return None
        owners = [self._of(lo, hi, each) for lo, hi in places]
        if None in owners:
            return None
        self.owner.update({n: k for n, k in zip(op.numbers, owners, strict=True) if k is not None})
        return Way(call.states, tuple(_whole(y.ndim, adds=True) for y in op.outputs))

    def joined(self, op: LogicalOp, call: Call) -> Way | None:
        """The way of an op that puts samples behind each other, if those of each micro-batch are where its own go."""
        (y,) = call.outputs
        dim = call.bound["dim"] % y.ndim
        lengths = [1 if call.name == "stack" else x.shape[dim] if x.ndim == y.ndim else 0 for x in call.inputs]
        each, rest = divmod(y.shape[dim], self.runs.sizes[0])
        ends = [0] * len(self.runs.lengths[0])
        for n, length in zip(op.inputs, lengths, strict=True):
            ends[self.owner[n]] += length
        order = [self.owner[n] for n in op.inputs]
        if rest or not each or order != sorted(order) or ends != [each * n for n in self.runs.lengths[0]]:
            return None
        cut = _whole(y.ndim)._replace(dims=tuple((0,) if d == dim else () for d in range(y.ndim)))
        return Way(call.states, (cut,))

    def _of(self, lo: int, hi: int, each: int) -> int | None:
        """The micro-batch that has this range of a dim, if it is one."""
        ends = pairwise([0, *(self.runs.bounds(0, k)[1] * each for k in range(len(self.runs.lengths[0])))])
        return next((k for k, (first, end) in enumerate(ends) if first <= lo < hi <= end), None)


def taken_from(op: LogicalOp, call: Call) -> tuple[int, list[tuple[int, int]]] | None:
    """The dim of which an op takes parts, and the range of each."""
    name, x = call.name, call.inputs[0] if call.inputs else None
    if x is None or not x.ndim or len(op.inputs) != 1:
        return None
    parts = "pieces" in traits(name) or name.startswith(("unsafe_split", "unsafe_chunk", "tensor_split.ind"))
    if name in ("unbind.int", "select.int"):
        dim = call.bound["dim"] % x.ndim
        at = call.bound.get("index")
        return dim, [(n % x.shape[dim], n % x.shape[dim] + 1) for n in (range(x.shape[dim]) if at is None else [at])]
    if not parts and name not in ("slice.Tensor", "narrow"):
        return None
    dim = call.bound["dim"] % x.ndim
    first = call.bound.get("start") or 0
    if call.bound.get("step", 1) != 1 or not isinstance(first, int):
        return None
    at, found = max(0, first + x.shape[dim] if first < 0 else first), []
    for y in op.outputs:
        found.append((at, at + y.shape[dim]))
        at += y.shape[dim]
    return dim, found


def refuse_owned(logical: Logical, owner: Mapping[int, int]) -> None:
    """Refuse results that are true or false of one sample: others would have to add nothing to them."""
    made = ((n, y, op) for op in logical.ops for n, y in zip(op.numbers, op.outputs, strict=True))
    kinds = {n: op for n, y, op in made if y.dtype == torch.bool}
    for op in [kinds[n] for n in logical.ends if n in owner and n in kinds]:
        raise SbpError(
            f"{op.name} at {op.origin.line or 'no line'} needs more than one micro-batch at once\n"
            "  it is true or false of one sample, which is a result of the step: return numbers, as by .long()"
        )


def _whole(ndim: int, adds: bool = False) -> State:
    return State(((),) * ndim, (0,) if adds else ())
