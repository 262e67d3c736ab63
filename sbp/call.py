"""The words that rules are written in: a call, how its dims hang together, and a way to run it on shards.

Call     one ATen call on logical tensors, as captured: shapes, dtypes, static arguments
Match    what a rule says of a call: which dims are one *factor*, so that they are split together or not at all
Way      one signature of a call: the state of every tensor that goes in and comes out
Piece    one rank's share of a way; what a local function may ask for
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import count
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..placement.structure import ATOMS, leaves, mapped
from .layout import Layout
from .state import Factors, Spans, State, Window

__all__ = [
    "NEVER",
    "Call",
    "Indices",
    "LocalFunction",
    "Match",
    "Piece",
    "Ref",
    "Rewritten",
    "Way",
    "fill",
    "frozen",
    "in_order",
    "map_tensors",
    "numbered",
    "refilled",
    "refs_in",
    "renumbered",
    "tensors_in",
]

NEVER = -1  # in place of a factor: this dim is never split


class Ref(NamedTuple):
    """In an argument: the tensor with this number stands here."""

    number: int


class Indices(NamedTuple):
    """An argument of index ranges: those of a tensor input's dim that a rank holds, as [first, end, first, end, ...].

    Only calls that a composite fixes have it; of the whole tensor it is [0, size].
    """

    slot: int
    dim: int

    def of(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        return [end for span in spans for end in span]


def frozen(value: Any) -> Hashable:
    """An argument as something to compare: 1, 1.0 and True are three, 0.0 and -0.0 two, and two NaN one."""
    if type(value) in _EXACT:
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(frozen, value))
    if isinstance(value, Mapping):
        return tuple((name, frozen(value[name])) for name in sorted(value))
    if isinstance(value, slice):
        return slice, frozen((value.start, value.stop, value.step))
    exact = isinstance(value, _WRITTEN) or not value.__hash__
    return type(value), repr(value) if exact else value


_EXACT = ATOMS - {float, complex}
_WRITTEN = (float, complex, Decimal, np.generic)  # of which equal ones may differ in a sign, and one from itself


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or result, in order."""
    return [value] if isinstance(value, Tensor) else leaves(value, Tensor)


def refs_in(value: Any) -> list[int]:
    """The numbers of the `Ref`s of an argument, in order."""
    return [ref.number for ref in leaves(value, Ref)]


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """A structure with every tensor in it replaced."""
    return change(value) if isinstance(value, Tensor) else mapped(value, Tensor, change)


def refilled(value: Any, tensors: Iterable[Any]) -> Any:
    """A structure with these in the place of its tensors, in order."""
    put = iter(tensors)
    return map_tensors(value, lambda _: next(put))


def numbered(value: Any) -> Any:
    """A structure with `Ref`s in the place of its tensors, numbered in order."""
    return refilled(value, map(Ref, count()))


def renumbered(value: Any, numbers: Mapping[int, int]) -> Any:
    """A structure with other numbers in its `Ref`s, where it says so."""
    return mapped(value, Ref, lambda ref: Ref(numbers.get(ref.number, ref.number)))


def fill(value: Any, tensors: Sequence[Any] | Mapping[int, Any]) -> Any:
    """A structure with these in the place of its `Ref`s."""
    return mapped(value, Ref, lambda ref: tensors[ref.number])


def in_order(op: torch._ops.OpOverload, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name in the order of the op's schema."""
    at = {parameter.name: i for i, parameter in enumerate(op._schema.arguments)}
    return dict(sorted(kwargs.items(), key=lambda item: at.get(item[0], len(at))))


@dataclass(frozen=True, eq=False)
class Call:
    """One ATen call. The tensors are fakes or metas: they have shape, dtype and stride, but no values.

    `states` says how the tensor inputs lie now and `sizes` is the shape of their grid; only rules that map states
    (views) look at them.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    states: tuple[State, ...] = ()
    sizes: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """As rules name it: `add.Tensor`, `relu` for the default overload, `mylib::op` outside aten."""
        namespace, _, op = self.op._schema.name.partition("::")
        overload = self.op._overloadname
        full = op if overload == "default" else f"{op}.{overload}"
        return full if namespace == "aten" else f"{namespace}::{full}"

    @cached_property
    def bound(self) -> dict[str, Any]:
        """Every argument by its name in the schema, defaults filled in."""
        values = {}
        for at, parameter in enumerate(self.op._schema.arguments):
            if parameter.name in self.kwargs:
                values[parameter.name] = self.kwargs[parameter.name]
            elif at < len(self.args):
                values[parameter.name] = self.args[at]
            else:
                values[parameter.name] = parameter.default_value
        return values

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensor inputs in the schema's order, lists taken apart; absent ones and numbers are not among them."""
        return tuple(tensors_in(list(self.bound.values())))

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers; attention and dropout that are told not to do not."""
        if torch.Tag.nondeterministic_seeded not in self.op.tags:
            return False
        off = ("dropout_p", 0), ("train", False), ("training", False)
        return all(self.bound.get(name) != value for name, value in off)


@dataclass(frozen=True, eq=False)
class Match:
    """A rule laid over a call: for each tensor and dim the number of its factor, or NEVER.

    On one axis of a grid a call may run with one factor split (a tensor that lacks it is B), with one group of
    `linear` inputs P (the others B, all outputs P), or with everything B. Factors in `reduced` leave P of that kind in
    every output; "avg" leaves P(sum) of means weighted by their share. An input in `addends` is added to the result, so
    that it is P where a summed factor is split. A factor in `shared` is as long as it says in these inputs:
    where that cannot be split evenly these inputs stay whole, and if there are none, it is not split.

    `windows` are of ops whose results look beyond a rank's piece: where such a factor is split, ranks are given of the
    input what their part of the result sees. The size of the factor is then that of the result's dim.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]  # of each factor
    reduced: Mapping[int, str] = field(default_factory=dict)  # factor -> "sum", "max", "min" or "avg"
    linear: tuple[tuple[int, ...], ...] = ()
    addends: frozenset[int] = frozenset()
    shared: Mapping[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    hollow: bool = False  # whether ranks may be left with no element at all (amax, convolutions and others refuse)
    local: "LocalFunction | None" = None
    also: "tuple[Way, ...]" = ()  # ways that no factor says, from the states in which the inputs lie now
    unread: frozenset[int] = frozenset()  # factors of which `local` looks for no places
    windows: Mapping[tuple[int, int], Window] = field(default_factory=dict)  # (input, factor) -> how it is seen
    near: "LocalFunction | None" = None  # what ranks run, in the place of `local`, where such a factor is split
    alone: "Match | None" = (
        None  # what holds besides, for ranks that ask no neighbours: of micro-batches there are none
    )

    def whole(self, factor: int, parts: int) -> frozenset[int] | None:
        """The inputs that stay whole though they have a factor that is split in so many parts; None if it cannot be."""
        number, inputs = self.shared.get(factor, (0, frozenset()))
        if number % parts == 0:
            return frozenset()
        return inputs or None

    def may_have_holes(self, factor: int, cut: Factors, sizes: tuple[int, ...]) -> bool:
        """Whether a factor may be cut so. Local functions count on one piece of what they look at, and uneven holes
        leave ranks with nothing sooner than plain pieces do."""
        if any(f == factor for _, f in self.windows):
            return False
        even = self.sizes[factor] % prod(sizes[f] if f >= 0 else -f for f in cut) == 0
        if self.local is None:
            return self.hollow or even
        return factor in self.unread and even


@dataclass(frozen=True)
class Way:
    """One signature: how each tensor input must lie, how each tensor output then lies, and what ranks run.

    Without `local` they run the op itself, with its arguments as they are.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    local: "LocalFunction | None" = None


@dataclass(frozen=True)
class Piece:
    """The pieces that one rank holds of the tensors of a call under the chosen way."""

    rank: int
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def shape(self, at: int = 0) -> tuple[int, ...]:
        """The local shape of an output."""
        return self.outputs[at].local_shape(self.rank)

    def spans(self, at: int, dim: int) -> Spans:
        """The index ranges that this rank holds of a dim of an input."""
        return self.inputs[at].spans(self.rank)[dim]

    def out_spans(self, at: int, dim: int) -> Spans:
        """The index ranges that this rank holds of a dim of an output."""
        return self.outputs[at].spans(self.rank)[dim]

    def first(self, axis: int) -> bool:
        """Whether this rank is the first along an axis of the grid; where only one may add something, it does."""
        return self.inputs[0].placement.coords(self.rank)[axis] == 0


@dataclass(frozen=True)
class Rewritten:
    """A local function that makes one call, with arguments that depend on the piece alone.

    `rewrite(piece, *args, **kwargs)` says which function and which arguments; it is asked once a rank, not at every
    call, and hands tensors on without looking at them. One that looks at `shapes` of pieces alone says the same for
    all ranks that have equal ones.
    """

    rewrite: Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]
    shapes: bool = False

    def __call__(self, piece: Piece, *args: Any, **kwargs: Any) -> Any:
        function, mine = self.rewrite(piece, *args, **kwargs)
        return function(*mine)


# Called as local(piece, *args, **kwargs) with the op's own arguments, tensors replaced by this rank's shards.
LocalFunction: TypeAlias = Callable[..., Any]
