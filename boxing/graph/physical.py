"""The physical graph: what every rank runs on its shards, and every move in between. It prints, draws, and runs.

    source     a value that is there: an input, a parameter, a buffer
    op         one ATen call; ranks run it as the rule book says for these layouts, and nothing is sent
    box        a move of one value to another layout, which is a value of its own
    back       a move of a gradient: the transpose of a box, or what brings a parameter's gradient together

The gradient of a value that has one lies as `layout.dual` says. Those of all its users are added up there before it is
moved on, so that every move happens once.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from ...placement import Cluster, Placement, use_cluster
from ...placement.structure import leaves
from ...sbp import Layout
from ...sbp.call import in_order
from ...sbp.logical import OffloadPlace, Origin, Round
from ..boxing import Boxing, between
from ..encoding import Encoding, MoveEncoder, encoded_boxings
from .memory_order import MemoryOrder

_CASTS = frozenset({torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default})

__all__ = ["Back", "Box", "Physical", "Op", "Source", "GraphStep", "Value", "Var", "in_narrower", "vars_in"]


class Var(NamedTuple):
    """In an argument: the value with this name stands here."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. Names are unique; `grad` says whether a gradient comes back to it. Where segments begin
    and end its pieces lie in memory in this `order`, and so do those of its gradient."""

    name: str
    layout: Layout
    grad: bool = False
    order: MemoryOrder = field(default=None, compare=False)


@dataclass(frozen=True)
class Source:
    """A value from outside.

    A parameter's gradient, `grads`, and its optimizer's master and states, `states`, may lie otherwise and be of
    another dtype; None: as the parameter. Changed pieces are moved from the layout of `states` to that of the parameter
    (ZeRO-1). An optimizer that looks at more than an element at once steps on all of a parameter, and on so many
    tensors of its state: `whole`; or one rank does, the `owner`, which keeps the state. With `offload` the optimizer
    has them on the host. A gradient that goes home `once` is added up over micro-batches where it is made, although it
    is smaller at home.
    """

    value: Value
    kind: str  # input, parameter, buffer, constant
    grads: Layout | None = None
    states: Layout | None = None
    whole: int | None = None  # None: it steps on the pieces
    offload: OffloadPlace | None = field(default=None, kw_only=True)
    owner: int | None = field(default=None, kw_only=True)
    once: bool = field(default=False, kw_only=True)

    @property
    def home(self) -> Layout:
        """The layout in which the gradient is brought together, added up, and kept until the update."""
        return _added_up(self.grads or self.value.layout)

    @property
    def master(self) -> Layout:
        """The layout in which the optimizer changes the parameter, and keeps its state."""
        return _added_up(self.states or self.value.layout)


def _added_up(of: Layout) -> Layout:
    return of.with_state(of.state)


def _narrower(dtype: torch.dtype, other: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < other.itemsize


def in_narrower(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """The ends of a move in an update, in the narrower of their dtypes: it is cast before or behind the move."""
    if src.dtype is dst.dtype:
        return src, dst
    if src.dtype.itemsize > dst.dtype.itemsize:
        return src.with_dtype(dst.dtype), dst
    return src, dst.with_dtype(src.dtype)


@dataclass(frozen=True)
class Op:
    """One ATen call, in which tensors stand as `Var`s."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    grad: bool = True
    origin: Origin = field(default=Origin(), compare=False)
    round: Round | None = None  # the round of a composite, whose inputs may lie on turned placements

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that go in, in the order of the schema; one may come twice."""
        return tuple(vars_in((self.args, in_order(self.op, self.kwargs))))


@dataclass(frozen=True)
class Box:
    """A move: `output` is `source` in another layout, perhaps on another placement.

    With `again` a backward that reads the output moves it once more, so that only the source is kept until then. With
    an encoder it goes to other ranks in fewer bytes.
    """

    source: str
    output: Value
    origin: Origin = field(default=Origin(), compare=False)
    again: bool = False
    encoder: MoveEncoder | None = None

    @property
    def outputs(self) -> tuple[Value, ...]:
        return (self.output,)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.source,)


GraphStep: TypeAlias = Op | Box


@dataclass(frozen=True)
class Back:
    """The gradient of `of`, all its users' parts added up in `src`, moved to `dst` and added to that of `into`.

    For a parameter's own gradient `of` and `into` are the same. Those of one `bucket` go in one exchange. A sum may
    have an `encoding`, and what hops to other ranks an `encoder`.
    """

    of: str
    into: str
    src: Layout
    dst: Layout
    bucket: int | None = None
    encoding: Encoding | None = None
    encoder: MoveEncoder | None = None

    @property
    def boxing(self) -> Boxing:
        """The boxing; for an encoded move, that of the exchange with most bytes."""
        if self.encoder is not None:
            return self.encoder.hop_boxing(self.src, self.dst)
        if self.encoding is None:
            return between(self.src, self.dst)
        return max(encoded_boxings([(self.src, self.dst)], [self.encoding]), key=lambda way: way.bytes)


def vars_in(value: Any) -> list[str]:
    """The names of the `Var`s of an argument, in order."""
    return [var.name for var in leaves(value, Var)]


@dataclass(frozen=True)
class Physical:
    """A step: the forward in order, then the moves of gradients in the order in which the backward reaches them."""

    name: str
    sources: tuple[Source, ...]
    steps: tuple[GraphStep, ...]
    backs: tuple[Back, ...] = ()
    result: Any = None  # what the step returns, with Vars for tensors
    losses: tuple[tuple[str, str | None], ...] = ()  # each with the value that its gradient starts from; None: one
    writes: Mapping[str, str] = field(default_factory=dict)  # buffers that change: name -> the value it then has
    called: Mapping[str, str] = field(default_factory=dict, compare=False)  # inputs as the user's function calls them
    cluster: Cluster | None = field(default=None, compare=False)  # by which it was chosen; None: the one in use
    given: bool = field(default=False, compare=False)  # whether every rank has all arguments from its caller

    @cached_property
    def values(self) -> dict[str, Value]:
        made = {y.name: y for step in self.steps for y in step.outputs}
        return {**{s.value.name: s.value for s in self.sources}, **made}

    def priced(self) -> AbstractContextManager[object]:
        """Prices all by the cluster by which it was chosen, whichever is in use when it is looked at."""
        return nullcontext() if self.cluster is None else use_cluster(self.cluster)

    @cached_property
    def ranks(self) -> Placement:
        """All ranks of the step, in a line."""
        homes = list(dict.fromkeys(value.layout.placement for value in self.values.values()))
        ranks = sorted({rank for home in homes for rank in home.flat})
        return Placement(homes[0].type, tuple(ranks), (len(ranks),), None)

    def layout(self, name: str) -> Layout:
        return self.values[name].layout

    def gradient(self, name: str) -> Layout:
        """The layout of a value's gradient as its users leave it: the dual. A parameter's has the type in which it is
        brought together, and so has that of a lone move or cast of one."""
        dual, dtype = self.layout(name).dual, self._gathering.get(name)
        return dual if dtype is None or dtype is dual.dtype else dual.with_dtype(dtype)

    @cached_property
    def _gathering(self) -> dict[str, torch.dtype]:
        """The type in which gradients are brought together, for parameters that name one, and for lone moves or
        narrowing casts of these."""
        said = (s for s in self.sources if s.kind == "parameter" and s.value.grad and s.grads is not None)
        found = {s.value.name: s.home.dtype for s in said}
        for step in self.steps if found else ():
            if len(step.inputs) == 1 and step.inputs[0] in found:
                (made, *_), dtype = step.outputs, found[step.inputs[0]]
                if isinstance(step, Box) or (step.op in _CASTS and _narrower(made.layout.dtype, dtype)):
                    found[made.name] = dtype
        return found

    def boxing(self, box: Box) -> Boxing:
        src, dst = self.layout(box.source), box.output.layout
        return between(src, dst) if box.encoder is None else box.encoder.hop_boxing(src, dst)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(step for step in self.steps if isinstance(step, Box))

    @cached_property
    def copied(self) -> frozenset[str]:
        """The copies of arguments on other ranks that no move makes, because these have the arguments as well."""
        inputs = {s.value.name for s in self.sources if s.kind == "input" and not s.value.grad and self.given}
        found: set[str] = set()
        for box in self.boxes if inputs else ():
            if box.source in inputs:
                inputs.add(box.output.name)
                here, there = self.layout(box.source).placement, box.output.layout.placement
                found.update([box.output.name] if set(here.flat).isdisjoint(there.flat) else [])
        return frozenset(found)
