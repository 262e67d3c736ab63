"""The step of one micro-batch as a value: a graph, and the arguments it has besides the step's own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....sbp.call import Ref, frozen, refs_in
from ....sbp.logical import Logical, LogicalOp
from ....sbp.state import Factors, State
from ....sbp.traits import traits

__all__ = [
    "CAST", "BatchDraw", "Known", "MaskedPlaces", "Micro", "Share", "drawn_alone", "ends_of", "filled", "is_filled",
    "made_alone", "program_of", "text_of",
]  # fmt: skip


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


@dataclass(frozen=True, eq=False)
class BatchDraw(Known):
    """Random numbers of the batch, drawn before the step in the order of the program, so that they are those of one
    device. What is true or false is held as such, and not as numbers."""

    @property
    def constant(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class MaskedPlaces(Known):
    """A mask of the places of samples that others are put into, in order: `each` elements for a sample, which is right
    in a micro-batch if its own places take just those. A place of the mask stands for `times` elements."""

    each: int = 0
    times: int = 1
    line: str = ""

    def taken(self, mask: Tensor) -> int:
        """How many elements the places of a mask take."""
        return int(mask.sum()) * self.times


class Share(NamedTuple):
    """The share of the batch that a micro-batch is along some axes, as a number to compute with."""

    name: str
    axes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Micro:
    """A step of one micro-batch. `states` says how each of its ends lies along time; `pasts` are arguments of attention
    in slices: what earlier slices left. What is `drawn` and used is among what is `known`."""

    logical: Logical
    known: tuple[Known, ...]
    shares: tuple[Share, ...]
    pasts: tuple[str, ...]
    states: Mapping[int, State]
    drawn: tuple[BatchDraw, ...] = ()  # all random numbers of the batch, in order, also those that no piece needs


CAST = torch.ops.aten._to_copy.default
FILLED = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}


def made_alone(logical: Logical, number: int) -> Logical:
    """The part of a graph that makes one value."""
    ops = tuple(  # a part runs in its own time
        filled(logical, op, op.outputs[0]) if is_filled(op) else op for op in logical.ops if not op.is_part
    )
    return replace(logical, ops=ops, result=Ref(number), losses=(), writes={}).pruned()


def drawn_alone(logical: Logical, op: LogicalOp) -> Logical:
    """The graph that draws random numbers for the whole batch, by an op that reads no values."""
    fresh = count(max(logical.fakes, default=-1) + 1)
    ops, (result,), (y,) = op.without_values(logical.fakes, fresh), op.numbers, op.outputs
    if op.name.startswith("bernoulli"):
        held = torch.empty(y.shape, dtype=torch.bool, device="meta")
        cast = LogicalOp(CAST, (Ref(result),), {"dtype": torch.bool}, (held,), (next(fresh),))
        ops, result = [*ops, cast], cast.numbers[0]
    return Logical((), tuple(ops), Ref(result))


def is_filled(op: LogicalOp) -> bool:
    """Whether an op makes a tensor of another's shape, or device, and reads nothing else of it."""
    return bool({"like", "new"} & traits(op.name))


def filled(logical: Logical, op: LogicalOp, y: Tensor) -> LogicalOp:
    """A filled tensor of another's shape, or a piece of it such as `y`, without that other."""
    value = logical.call(op).bound.get("fill_value", FILLED.get(op.name, 0))
    full, how = torch.ops.aten.full.default, {"dtype": y.dtype, "device": op.outputs[0].device}
    return replace(op, op=full, args=(list(y.shape), value), kwargs=how, outputs=(y,))


def text_of(parts: Logical) -> Any:
    """Ops as something to compare."""
    return [(op.op, frozen((op.args, op.kwargs)), op.numbers) for op in parts.ops], refs_in(parts.result)


def program_of(micro: Micro) -> Any:
    """All that a step of a micro-batch does, with values numbered in the order in which they are made."""
    logical = micro.logical
    made = (n for op in logical.ops for n in op.numbers)
    one = logical.map({n: at for at, n in enumerate(made, len(logical.sources))})
    ops = [(op.op, frozen((op.args, op.kwargs)), op.grad, op.placement, op.lies, op.outputs[0].shape) for op in one.ops]
    sources = [(s.name, s.kind, s.fake.shape, s.fake.dtype) for s in logical.sources]
    known = [(type(known), known.name, known.dims, known.hides, str(known.graph)) for known in micro.known]
    ends = frozen(one.result), one.losses, sorted(one.writes.items()), [micro.states[n] for n in ends_of(logical)]
    return ops, sources, known, micro.shares, ends


def ends_of(logical: Logical) -> list[int]:
    """The values of a graph that others read."""
    losses = [n for loss in logical.losses for n in (loss.number, loss.gradient) if n is not None]
    return [*refs_in(logical.result), *logical.writes.values(), *losses]
