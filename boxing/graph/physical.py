"""The physical graph: what every rank runs on its shards, and every move in between. It prints, draws, and runs.

    source     a value that is there: an input, a parameter, a buffer
    op         one ATen call; ranks run it as the rule book says for these layouts, and nothing is sent
    box        a move of one value to another layout, which is a value of its own
    back       a move of a gradient: the transpose of a box, or what brings a parameter's gradient together

The gradient of a value that has one lies as `layout.dual` says. Those of all its users are added up there before it is
moved on, so that every move happens once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch

from ...sbp import Layout
from ...sbp.call import in_order, leaves
from ...sbp.logical import Origin
from ..plan import Plan, plan

__all__ = ["Back", "Box", "Physical", "Op", "Source", "GraphStep", "Value", "Var", "vars_in"]


class Var(NamedTuple):
    """In an argument: the value with this name stands here."""

    name: str


@dataclass(frozen=True)
class Value:
    """A tensor of the graph. Names are unique; `grad` says whether a gradient comes back to it."""

    name: str
    layout: Layout
    grad: bool = False


@dataclass(frozen=True)
class Source:
    """A value from outside.

    `update` is how a parameter's gradient is brought together and its optimizer's state lies; None: as the parameter.
    Where they differ (ZeRO-1), the optimizer changes its pieces, and these are moved to where the parameter lies.
    """

    value: Value
    kind: str  # input, parameter, buffer, constant
    update: Layout | None = None

    @property
    def home(self) -> Layout:
        """Where the gradient is brought together, added up."""
        of = self.update or self.value.layout
        return of.with_state(of.state)


@dataclass(frozen=True)
class Op:
    """One ATen call, in which tensors stand as `Var`s."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    grad: bool = True
    origin: Origin = field(default=Origin(), compare=False)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the tensors that go in, in the order of the schema; one may come twice."""
        return tuple(vars_in((self.args, in_order(self.op, self.kwargs))))


@dataclass(frozen=True)
class Box:
    """A move: `output` is `source` in another layout, perhaps on another placement."""

    source: str
    output: Value
    origin: Origin = field(default=Origin(), compare=False)

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

    For a parameter's own gradient `of` and `into` are the same. Those of one `bucket` go in one exchange.
    """

    of: str
    into: str
    src: Layout
    dst: Layout
    bucket: int | None = None

    @property
    def plan(self) -> Plan:
        return plan(self.src, self.dst)


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
    writes: Mapping[str, str] = field(default_factory=dict)  # of buffers that change: name -> the value it then has
    called: Mapping[str, str] = field(default_factory=dict, compare=False)  # inputs as the user's function calls them

    @cached_property
    def values(self) -> dict[str, Value]:
        made = {y.name: y for step in self.steps for y in step.outputs}
        return {**{s.value.name: s.value for s in self.sources}, **made}

    def layout(self, name: str) -> Layout:
        return self.values[name].layout

    def plan(self, box: Box) -> Plan:
        return plan(self.layout(box.source), box.output.layout)

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(step for step in self.steps if isinstance(step, Box))
