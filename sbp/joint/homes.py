"""Where ops run and sources live: as annotated, and else where what they use is."""

from collections.abc import Sequence
from typing import NamedTuple

from ...placement import Placement
from ...placement.errors import PlacementError
from ..logical import Logical

__all__ = ["Homes", "homes"]


class Homes(NamedTuple):
    """The placement of every source and every op, in order."""

    sources: tuple[Placement, ...]
    ops: tuple[Placement, ...]


def homes(logical: Logical, default: Placement | None) -> Homes:
    """An op outside of annotated modules runs where the last made of its inputs is that weights went into.

    What is made of arguments alone, as a mask or shifted labels, is made where it is first used; a source lives at its
    first use.

    >>> homes(Logical((), (), None), None)
    Homes(sources=(), ops=())
    """
    known: dict[int, Placement] = {n: s.placement for n, s in enumerate(logical.sources) if s.placement is not None}
    given = {n for n, s in enumerate(logical.sources) if s.kind in ("input", "constant")}
    for op in logical.ops:
        if op.placement is None and given.issuperset(op.inputs):
            given.update(op.numbers)
    ops: list[Placement | None] = []
    for op in logical.ops:
        made = [n for n in op.inputs if n in known]
        last = max(made, key=lambda n: (n not in given, n >= len(logical.sources), n), default=None)
        ops.append(op.placement or (None if last is None else known[last]))
        if ops[-1] is not None and not given.issuperset(op.numbers):
            for n in (*op.inputs, *op.numbers):
                known.setdefault(n, ops[-1])
    users: dict[int, Placement] = {}
    for at in reversed(range(len(ops))):
        op = logical.ops[at]
        if given.issuperset(op.numbers) and op.placement is None:
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
                "the graph has no placement\n  give one: flow.compile(..., placement=flow.placement('cpu:[0-3]')), "
                "or annotate modules by flow.nn.place(module, placement)"
            )
        found.append(there)
        for n in (*op.inputs, *op.numbers):
            known.setdefault(n, there)
    rest = default or (found[0] if found else None)
    return Homes(_sources(logical, known, rest), tuple(found))


def _sources(logical: Logical, known: dict[int, Placement], rest: Placement | None) -> tuple[Placement, ...]:
    found: Sequence[Placement | None] = [known.get(n, rest) for n in range(len(logical.sources))]
    if any(where is None for where in found):
        raise PlacementError("the graph has no placement\n  give one: flow.compile(..., placement=...)")
    return tuple(where for where in found if where is not None)
