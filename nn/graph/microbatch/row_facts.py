"""Facts of a step's values besides how they lie: whose entries they have, and which numbers these may be."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ....sbp.call import Call
from ....sbp.logical import LogicalOp
from ....sbp.traits import traits

__all__ = ["Counts", "RowFacts"]

INDICES = {"topk": 1, "sort": 1, "sort.stable": 1, "max.dim": 1, "min.dim": 1, "argmax": 0, "argmin": 0}
INDICES.update({"argsort": 0, "argsort.stable": 0})  # by op, which of its results are places of a dim
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)  # which hold every number of an expert


class Counts(NamedTuple):
    """How many entries of a value are 0, how many 1, and so on; or, where `ended`, the sums of these so far."""

    keys: int
    groups: int
    ended: bool = False


class RowFacts:
    """Facts by number of a value; ops are shown in their order."""

    def __init__(self, fakes: Mapping[int, Tensor]) -> None:
        self.fakes = fakes
        self.roots: dict[int, int] = {}  # another value that has the same entries, in whatever order
        self.bounds: dict[int, int] = {}  # of values of whole numbers from 0 to less than that
        self.counts: dict[int, Counts] = {}
        self.lines: set[int] = set()  # 0, 1, 2, ...
        self.even: set[int] = set()  # the same number at every place

    def root(self, n: int) -> int:
        return self.roots.get(n, n)

    def within(self, n: int, groups: int) -> bool:
        """Whether all entries are numbers of so many groups."""
        return self.bounds.get(self.root(n), groups + 1) <= groups

    def see(self, op: LogicalOp, call: Call) -> None:
        """Note what an op tells of its results."""
        name, said, first, (y, *_) = call.name, traits(call.name), op.numbers[0], op.outputs
        if name in INDICES and call.inputs[0].ndim and call.bound.get("dim") is not None:
            self.bounds[op.numbers[INDICES[name]]] = call.inputs[0].shape[call.bound["dim"]]
        if name in ("arange", "arange.start") and not call.bound.get("start") and not y.is_floating_point():
            self.lines.add(first)
        if ({"like", "new"} & said or ("even" in said and not op.inputs)) and "empty" not in said:
            self.even.add(first)
        bounds = [self.bounds.get(self.root(n)) for n in op.inputs]
        if name in ("cat", "concat", "concatenate", "stack") and None not in bounds:
            self.bounds[first] = max(filter(None, bounds), default=0)
        if len(op.inputs) == 1:
            self._of_one(op.inputs[0], name, said, call, first, y)

    def _of_one(self, n: int, name: str, said: frozenset[str], call: Call, first: int, y: Tensor) -> None:
        x = self.fakes[n]
        plain = y.dtype in EXACT and x.dtype in EXACT and name != "view.dtype"
        if plain and {"same", "reshaped", "permuted"} & said and y.numel() == x.numel():
            self.roots[first] = self.root(n)
            if n in self.counts and "same" in said:
                self.counts[first] = self.counts[n]
        if name == "clamp" and call.bound["min"] == 0 and isinstance(call.bound["max"], int):
            self.bounds[first] = call.bound["max"] + 1
        if name == "histc" and call.bound["min"] == 0:
            bins = call.bound["bins"]
            if call.bound["max"] in (bins, bins - 1) and self.within(n, bins):
                self.counts[first] = Counts(self.root(n), bins)
        counts = self.counts.get(n)
        if name == "cumsum" and counts is not None and not counts.ended and y.dtype in EXACT:
            self.counts[first] = counts._replace(ended=True)
