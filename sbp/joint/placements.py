"""Placements of ops and sources: as annotated, and else those of the values that they use."""

from collections.abc import Sequence
from typing import NamedTuple

from ...placement import Placement
from ...placement.errors import PlacementError
from ..logical import Logical, LogicalOp

__all__ = ["Homes", "homes"]


class Homes(NamedTuple):
    """The placement of every source and every op, in order."""

    sources: tuple[Placement, ...]
    ops: tuple[Placement, ...]

    def by_name(self, logical: Logical) -> dict[str, Placement]:
        """The placements of the graph's sources."""
        return {s.name: there for s, there in zip(logical.sources, self.sources, strict=True)}


def homes(logical: Logical, default: Placement | None) -> Homes:
    """The placement of every op and source. An op outside of annotated modules runs where the last layer behind its
    inputs does. It runs where other inputs are or its results are used if less is sent then: on a skip connection, with
    the layer at one of its ends.

    Values made of arguments or weights alone, such as a mask, shifted labels or `weight + 1`, are made where they are
    first used; a source lives at its first use.

    >>> homes(Logical((), (), None), None)
    Homes(sources=(), ops=())
    """
    known: dict[int, Placement] = {n: s.placement for n, s in enumerate(logical.sources) if s.placement is not None}
    given = {n for n, s in enumerate(logical.sources) if s.kind in ("input", "constant")}
    for op in logical.ops:
        if op.placement is None and given.issuperset(op.inputs):
            given.update(op.numbers)
    ops: list[Placement | None] = []
    layer: dict[int, int] = {}  # of a made value the last op of an annotated module that is behind it
    for at, op in enumerate(logical.ops):
        made = [n for n in op.inputs if n in known]
        behind = at if op.placement else max((layer.get(n, -1) for n in op.inputs), default=-1)
        layer.update(dict.fromkeys(op.numbers, behind))
        last = max(made, key=lambda n: (n not in given, layer.get(n, -1), n >= len(logical.sources), n), default=None)
        ops.append(op.placement or (None if last is None else known[last]))
        if ops[-1] is not None and not given.issuperset(op.numbers):
            for n in (*op.inputs, *op.numbers):
                known.setdefault(n, ops[-1])
    _nearer(logical, ops, given, layer)
    users: dict[int, Placement] = {}
    for at in reversed(range(len(ops))):
        op = logical.ops[at]
        if op.placement is None and (ops[at] is None or given.issuperset(op.numbers)):
            ops[at] = next((users[n] for n in op.numbers if n in users), ops[at])
        there = ops[at] or default
        if there is not None:
            users.update(dict.fromkeys(op.inputs, there))  # the first use is the last that is seen here
    first = default or next((op.placement for op in logical.ops if op.placement is not None), None)
    found: list[Placement] = []
    for op, there in zip(logical.ops, ops, strict=True):
        there = there or first
        if there is None:
            raise PlacementError(
                f"the graph has no placement, and {op.name} at {op.origin.line or 'no line'} none either\n"
                "  give one: flow.compile(..., placement=flow.placement('cpu:[0-3]')), "
                "or annotate modules by flow.nn.place(module, placement)"
            )
        found.append(there)
        for n in (*op.inputs, *op.numbers):
            known.setdefault(n, there)
    rest = default or (found[0] if found else None)
    return Homes(_sources(logical, known, rest), tuple(found))


def _nearer(logical: Logical, ops: list[Placement | None], given: set[int], layer: dict[int, int]) -> None:
    """Move ops that no module holds to where least is sent for them. They go towards their users first, then back
    towards the last layer behind their inputs, which wins among ways that send as much."""
    makers = {n: at for at, op in enumerate(logical.ops) for n in op.numbers}
    users: dict[int, list[int]] = {}
    for at, op in enumerate(logical.ops):
        for n in dict.fromkeys(op.inputs):
            users.setdefault(n, []).append(at)

    def loose(op: LogicalOp) -> bool:
        """Whether it is bound to no place, by a module or by a weight."""
        bound = any(n not in makers and logical.sources[n].kind in ("parameter", "buffer") for n in op.inputs)
        return op.placement is None and not bound and not given.issuperset(op.numbers)

    def sent(at: int, there: Placement) -> int:
        """Bytes that go to an op and from it if it runs there, those of gradients too."""
        op = logical.ops[at]
        elsewhere = [n for n in dict.fromkeys(op.inputs) if n in makers and ops[makers[n]] not in (there, None)]
        come = [n for n in elsewhere if all(ops[user] != there for user in users[n] if user != at)]
        go = [n for n in op.numbers if any(ops[user] not in (there, None) for user in users.get(n, ()))]
        return sum(logical.fakes[n].nbytes * (1 + (n in logical.wants_grad)) for n in (*come, *go))

    free = [at for at, op in enumerate(logical.ops) if loose(op)]
    for listed, ahead in ((reversed(free), True), (iter(free), False)):
        for at in listed:
            op = logical.ops[at]
            last = max((n for n in op.inputs if n in makers), key=lambda n: (layer[n], n), default=None)
            made = [] if last is None else [ops[makers[last]]]  # no earlier one: the pipeline does not go back there
            used = [ops[user] for n in op.numbers for user in users.get(n, ())]
            first, second = (used, made) if ahead else (made, used)
            places = [place for place in dict.fromkeys((*first, ops[at], *second)) if place is not None]
            if len(places) > 1:
                ops[at] = min(places, key=lambda there: sent(at, there))


def _sources(logical: Logical, known: dict[int, Placement], rest: Placement | None) -> tuple[Placement, ...]:
    found: Sequence[Placement | None] = [known.get(n, rest) for n in range(len(logical.sources))]
    if any(where is None for where in found):
        raise PlacementError("the graph has no placement\n  give one: flow.compile(..., placement=...)")
    return tuple(where for where in found if where is not None)
