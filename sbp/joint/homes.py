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
    """An op outside of annotated modules runs where the last made of its inputs is; a source lives at its first use.

    >>> homes(Logical((), (), None), None)
    Homes(sources=(), ops=())
    """
    known: dict[int, Placement] = {n: s.placement for n, s in enumerate(logical.sources) if s.placement is not None}
    ops: list[Placement] = []
    for op in logical.ops:
        made = [n for n in op.inputs if n in known]
        there = op.placement or (known[max(made, key=lambda n: (n >= len(logical.sources), n))] if made else default)
        if there is None:
            there = next((later.placement for later in logical.ops if later.placement is not None), None)
        if there is None:
            raise PlacementError(
                "the graph has no placement\n  give one: flow.compile(..., placement=flow.placement('cpu:[0-3]')), "
                "or annotate modules by flow.nn.place(module, placement)"
            )
        ops.append(there)
        for n in op.inputs:
            known.setdefault(n, there)
        known.update(dict.fromkeys(op.numbers, there))
    rest = default or (ops[0] if ops else None)
    return Homes(_sources(logical, known, rest), tuple(ops))


def _sources(logical: Logical, known: dict[int, Placement], rest: Placement | None) -> tuple[Placement, ...]:
    found: Sequence[Placement | None] = [known.get(n, rest) for n in range(len(logical.sources))]
    if any(where is None for where in found):
        raise PlacementError("the graph has no placement\n  give one: flow.compile(..., placement=...)")
    return tuple(where for where in found if where is not None)
