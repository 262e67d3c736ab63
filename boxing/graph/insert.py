"""Inserting the moves: from a logical graph and what was chosen for each of its parts to the physical graph.

A value is moved once for each way in which it is wanted. One with several users is moved to the layout of its copy
first, and on from there, because it was priced so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.structure import mapped
from ...sbp import Layout
from ...sbp.call import Ref, in_order, refs_in
from ...sbp.joint.along_split import Spread
from ...sbp.joint.options import Option
from ...sbp.joint.pins import is_pin_alone
from ...sbp.joint.placements import Homes
from ...sbp.joint.source_options import Stored
from ...sbp.logical import Logical, LogicalOp, Origin
from ...sbp.state import Lie
from ..encoding import FilledRows, MoveEncoder
from .memory_order import order_of
from .physical import Box, GraphStep, Op, Physical, Source, Value, Var
from .transpose import with_backs

__all__ = ["Choice", "insert"]

NOWHERE = Origin()


@dataclass(frozen=True)
class Choice:
    """All that was chosen: for each source and op in order, and by number for tensors of several users and results."""

    sources: Sequence[Stored]
    ops: Sequence[Option | Spread]
    copies: Mapping[int, tuple[Placement, Lie]]
    results: Mapping[int, Lie]


def insert(logical: Logical, where: Homes, choice: Choice, name: str = "graph") -> tuple[Physical, dict[int, str]]:
    """The physical graph, with the moves of gradients; and what each value of the logical graph is called in it."""
    made = _Insertion(logical, choice)
    sources = [made.source(n, stored, where.sources[n]) for n, stored in enumerate(choice.sources)]
    scope = _Scope(logical, {n: s.value.name for n, s in enumerate(sources)})
    for op, chosen, there in zip(logical.ops, choice.ops, where.ops, strict=True):
        made.run(scope, op, chosen, there)
    home = dict(enumerate(where.sources)) | {
        n: there for op, there in zip(logical.ops, where.ops, strict=True) for n in op.numbers
    }
    numbers = {s.name: n for n, s in enumerate(logical.sources)}
    writes = {
        buffer: made.wanted(scope, n, choice.sources[numbers[buffer]].lie, where.sources[numbers[buffer]])
        for buffer, n in logical.writes.items()
    }
    results = {n: made.wanted(scope, n, lie, home[n]) for n, lie in choice.results.items()}
    losses = tuple(
        (scope.names[loss.number], None if loss.gradient is None else scope.names[loss.gradient])
        for loss in logical.losses
    )
    graph = Physical(
        name,
        tuple(sources),
        tuple(made.steps),
        result=mapped(logical.result, Ref, lambda ref: Var(results[ref.number])),
        losses=losses,
        writes=writes,
    )
    return with_backs(graph), scope.names


@dataclass
class _Scope:
    """The names of a graph's values; formulas that ops are taken apart into have scopes of their own."""

    logical: Logical
    names: dict[int, str]
    prefix: str = ""
    origin: Origin | None = None


class _Insertion:
    def __init__(self, logical: Logical, choice: Choice) -> None:
        self.choice = choice
        self.steps: list[GraphStep] = []
        self.values: dict[str, Value] = {}
        self.moved: dict[tuple[str, Layout], str] = {}
        self.counts: dict[str, int] = {}
        self.pieces: set[str] = set()  # values that somebody wants in pieces, and that are kept so
        self.outer = logical

    def source(self, number: int, stored: Stored, there: Placement) -> Source:
        source = self.outer.sources[number]
        of = _layout(source.fake, stored.lie, there)
        trained = source.kind == "parameter" and source.requires_grad
        grads = _layout(source.fake, stored.grads, there, source.grads)
        states = _layout(source.fake, stored.states, there, source.states)
        name, reached = self._fresh(source.name), number in self.outer.reached
        # Values that a graph keeps lie row by row, whatever the order of those it was given.
        value = _value(name, of, reached, source.fake) if source.kind == "input" else Value(name, of, reached)
        self.values[value.name] = value
        said = source.grads is not None or grads is not of
        apart = grads if trained and said else None, states if trained and states is not of else None
        offload, once = (source.offload, stored.once) if trained else (None, False)
        return Source(value, source.kind, *apart, offload=offload, once=once)

    def run(self, scope: _Scope, op: LogicalOp, chosen: Option | Spread, there: Placement) -> None:
        """Put the ops of one call, with the moves that they need before them."""
        if isinstance(chosen, Spread):
            return self._spread(scope, op, chosen, there)
        wanted = scope.logical.wants_grad
        origin = scope.origin or op.origin
        lies = enumerate(zip(op.inputs, chosen.inputs, strict=True))
        inputs = iter([self.taken(scope, op, slot, lie, there, origin) for slot, (_, lie) in lies])
        if is_pin_alone(op):  # it lies as it was moved
            scope.names[op.numbers[0]] = name = next(inputs)
            if self.values[name].layout.state.split:
                self.pieces.add(name)
            return
        args, kwargs = mapped((op.args, in_order(op.op, op.kwargs)), Ref, lambda _: Var(next(inputs)))
        base = scope.prefix or (f"{origin.module}." if origin.module else "")
        base += op.op._schema.name.rpartition("::")[2]
        outputs = []
        for at, (n, y, lie) in enumerate(zip(op.numbers, op.outputs, chosen.outputs, strict=True)):
            name = self._fresh(base if len(op.numbers) == 1 else f"{base}.{at}")
            of = _layout(y, lie if n in wanted else lie._replace(grads=()), there)
            value = _value(name, of, n in wanted, y)
            scope.names[n] = name
            self.values[name] = value
            outputs.append(value)
        turn = op.fixed.round if op.fixed else None
        self.steps.append(Op(op.op, args, kwargs, tuple(outputs), op.grad, origin, turn))

    def _spread(self, scope: _Scope, op: LogicalOp, chosen: Spread, there: Placement) -> None:
        inside = chosen.inside
        comes = enumerate(zip(op.inputs, chosen.lies, strict=True))
        names = {n: self.wanted(scope, number, lie, there, op.origin) for n, (number, lie) in comes}
        kind = op.op._schema.name.rpartition("::")[2]
        base = f"{op.origin.module}." if op.origin.module else ""
        inner = _Scope(inside, names, f"{base}{kind}.", op.origin)
        for part, option in zip(inside.ops, chosen.chosen, strict=True):
            self.run(inner, part, option, there)
        for outer, n in zip(op.numbers, refs_in(inside.result), strict=True):
            scope.names[outer] = inner.names[n]

    def taken(self, scope: _Scope, op: LogicalOp, slot: int, lie: Lie, there: Placement, origin: Origin) -> str:
        """The name of an input as an op takes it: some go round an axis before."""
        number, fixed = op.inputs[slot], op.fixed
        share = fixed.shares[slot] if fixed and fixed.shares else None
        name = self.wanted(scope, number, lie, there, origin, FilledRows(share=share) if share else None)
        turn = fixed.turns[slot] if fixed else None
        for on in turn.path(there) if turn else ():
            name = self._move(scope.names[number], name, _like(self.values[name].layout, lie, on), origin)
        return name

    def wanted(
        self,
        scope: _Scope,
        number: int,
        lie: Lie,
        there: Placement,
        origin: Origin = NOWHERE,
        encoder: MoveEncoder | None = None,
    ) -> str:
        """The name of a value as it is wanted, moved if it does not lie so."""
        name = scope.names[number]
        value = self.values[name]
        if not value.grad:
            lie = lie._replace(grads=())
        copy = self.choice.copies.get(number) if scope.logical is self.outer else None
        if copy is not None:
            at, between = copy
            if not value.grad:
                between = between._replace(grads=())
            name = self._move(name, name, _like(value.layout, between, at), origin)
        return self._move(scope.names[number], name, _like(value.layout, lie, there), origin, encoder)

    def _move(self, of: str, source: str, to: Layout, origin: Origin, encoder: MoveEncoder | None = None) -> str:
        """One move of `source`, which is the value `of` in some layout; a value that is there already is taken."""
        if self.values[of].layout is to:
            return of
        known = self.moved.get((of, to))
        if known is None:
            before = self.values[source]
            order = before.order if _stays(before.layout, to) else None
            value = Value(self._fresh(f"{of}@1"), to, before.grad, order)
            self.values[value.name] = value
            gathers = self.values[source].layout.state.split - to.state.split
            self.steps.append(Box(source, value, origin, bool(gathers) and source in self.pieces, encoder))
            known = self.moved[of, to] = value.name
        return known

    def _fresh(self, base: str) -> str:
        """A name that no other value has: `mul`, `mul_1`, and `x@1`, `x@2` for what is moved."""
        count = self.counts.get(base, 0)
        self.counts[base] = count + 1
        if base.endswith("@1"):
            return base[:-1] + str(count + 1)
        return base if not count else self._fresh(f"{base}_{count}")


def _value(name: str, of: Layout, grad: bool, fake: Tensor) -> Value:
    """A value in the order of one device's memory. Neither gradients repeat what they hold, nor need addends."""
    return Value(name, of, grad, order_of(fake, repeats=not grad and not of.state.partial))


def _stays(before: Layout, to: Layout) -> bool:
    """Whether ranks keep, or take views of, what they have; values that were sent lie row by row."""
    mine, other = before.state, to.state
    return (
        before.placement is to.placement
        and set(mine.partial) == set(other.partial)
        and mine.windows == other.windows
        and all(f == g[: len(f)] for f, g in zip(mine.dims, other.dims, strict=True))
    )


def _layout(fake: Tensor, lie: Lie, there: Placement, dtype: torch.dtype | None = None) -> Layout:
    is_float = fake.dtype.is_floating_point or fake.dtype.is_complex
    return Layout(there, lie.state, tuple(fake.shape), dtype or fake.dtype, lie.grads if is_float else ())


def _like(of: Layout, lie: Lie, there: Placement) -> Layout:
    is_float = of.dtype.is_floating_point or of.dtype.is_complex
    return Layout(there, lie.state, of.shape, of.dtype, lie.grads if is_float else ())
