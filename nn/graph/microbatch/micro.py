"""The step of one micro-batch as a value: a graph, and the arguments it has besides the step's own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ....sbp.call import Ref, refs_in
from ....sbp.logical import Logical, LogicalOp
from ....sbp.state import Factors, State
from ....sbp.traits import traits

__all__ = ["Known", "Micro", "Share", "made_alone"]


@dataclass(frozen=True, eq=False)
class Known:
    """A value made of the batch before the step, of arguments alone: micro-batches get their pieces of it, as `dims`
    are cut. Where it is a mask that hides later tokens, it must do so. All pieces of one update call it by one name."""

    name: str
    graph: Logical
    dims: tuple[Factors, ...]
    hides: bool = False

    @cached_property
    def constant(self) -> bool:
        """Whether it is the same at every step."""
        used = [*refs_in(self.graph.result), *(n for op in self.graph.ops for n in op.inputs)]
        return all(n >= len(self.graph.sources) for n in used)


class Share(NamedTuple):
    """The share of the batch that a micro-batch is along some axes, as a number to compute with."""

    name: str
    axes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Micro:
    """A step of one micro-batch. `states` says how each of its ends lies along time; `pasts` are arguments of attention
    in slices: what earlier slices left."""

    logical: Logical
    known: tuple[Known, ...]
    shares: tuple[Share, ...]
    pasts: tuple[str, ...]
    states: Mapping[int, State]


FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}


def made_alone(logical: Logical, number: int) -> Logical:
    """The part of a graph that makes one value."""
    ops = tuple(_of_shape(logical, op) for op in logical.ops)
    return replace(logical, ops=ops, result=Ref(number), losses=(), writes={}).pruned()


def _of_shape(logical: Logical, op: LogicalOp) -> LogicalOp:
    """A filled tensor of another's shape, without that other."""
    if not {"like", "new"} & traits(op.name):
        return op
    (y,) = op.outputs
    value = logical.call(op).bound.get("fill_value", FILLED.get(op.name, 0))
    return replace(op, op=torch.ops.aten.full.default, args=(list(y.shape), value), kwargs={"dtype": y.dtype})
