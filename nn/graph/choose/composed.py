"""Composites put in: ops of modules that notes tell how to compute are replaced by the calls of a composite."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

from ....placement import Placement
from ....placement.errors import PlacementError, SbpError
from ....sbp.joint.placements import Homes
from ....sbp.logical import Logical, LogicalOp
from ....sbp.traits import traits
from ...model.inside import CompositeSite, CompositeUse, Left

__all__ = ["Uses", "check_uses", "composed"]

SLICED, SLICES_OF = "sbpflow::attend", "scaled_dot_product_attention"
Uses: TypeAlias = Mapping[str, Sequence[CompositeUse]]  # by the path of a module


def check_uses(logical: Logical, uses: Uses) -> None:
    """An error for a note that meets no op in its module; one module is enough where a whole list was noted."""
    met = {use for op in logical.ops for use in _met(op, uses)}
    lists = {(use.use, use.over) for use in met if use.part}
    for use in (use for noted in uses.values() for use in noted):
        if use in met or (use.part and (use.use, use.over) in lists):
            continue
        within = [op for op in logical.ops if _is_in(op.origin.module, use.path)]
        found = ", ".join(dict.fromkeys(op.name for op in within))
        other = next((by for op in within if op.name in use.composite.ops and (by := _use_of(op, uses))), None)
        why = f"{other} counts there" if other else f"no {use.composite.noun} was called there"
        raise SbpError(
            f"{use}: {why}\n  called are {found or 'no ops at all'}\n"
            f"  note a module that calls {' or '.join(sorted(use.composite.ops))}, "
            "or take it back by flow.nn.inside(module, use=None)"
        )


def _met(op: LogicalOp, uses: Uses) -> Iterator[CompositeUse]:
    """The notes that an op follows: that which counts, and those around it that say the same."""
    first = _use_of(op, uses)
    if first is not None:
        around = (use for path in _outwards(op.origin.module) for use in uses.get(path, ()))
        yield from (use for use in around if (use.use, use.over) == (first.use, first.over))


def composed(logical: Logical, where: Homes, uses: Uses, pins: Mapping[str, Any]) -> Logical:
    """The graph with such ops replaced; `pins` has hints of parameters."""
    ops: list[LogicalOp] = []
    fresh = count(max(logical.fakes, default=-1) + 1)
    names = _names(logical)
    left: dict[CompositeUse, Left] = {}
    taken: set[CompositeUse] = set()
    for op, there in zip(logical.ops, where.ops, strict=True):
        use = _use_of(op, uses)
        if op.name == SLICED and (whole := _use_of(op, uses, SLICES_OF)):
            raise SbpError(
                f"{whole}: attention of a slice looks back at earlier slices, and no {whole.use} does that\n"
                "  leave slices= out, or take the note back by flow.nn.inside(module, use=None)"
            )
        axes = _axes(use, there) if use else ()
        made: list[LogicalOp] | Left = [op]
        if use is not None and (use.composite.alone or any(there.shape[at] > 1 for at in axes)):
            site = CompositeSite(op, logical, names, there, axes, use, pins, lambda: next(fresh))
            made = use.composite.calls(site)
            if isinstance(made, Left):
                left.setdefault(use, made)
            else:
                taken.add(use)
        ops += [op] if isinstance(made, Left) else made
    for use, why in left.items():
        if use not in taken:
            raise SbpError(f"{use}: no {use.composite.noun} there is one for it\n  {why.why}\n  {why.fix}")
    return replace(logical, ops=tuple(ops))


def _names(logical: Logical) -> dict[int, str]:
    """The names of parameters, buffers and arguments, also of those in another dtype."""
    names = {n: source.name for n, source in enumerate(logical.sources)}
    for op in logical.ops:
        if "same" in traits(op.name) and len(op.inputs) == 1 and op.inputs[0] in names:
            names[op.numbers[0]] = names[op.inputs[0]]
    return names


def _use_of(op: LogicalOp, uses: Uses, name: str = "") -> CompositeUse | None:
    """The note that counts for an op, which is perhaps called otherwise."""
    for path in _outwards(op.origin.module):
        for use in uses.get(path, ()):
            if (name or op.name) in use.composite.ops:
                return use
    return None


def _outwards(path: str) -> Iterator[str]:
    """A path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _axes(use: CompositeUse, there: Placement) -> tuple[int, ...]:
    try:
        axes = tuple(map(there.axis, use.over))
    except PlacementError as error:
        raise PlacementError(f"{use}: {error}") from None
    if len(set(axes)) < len(axes):
        raise PlacementError(f"{use}: an axis is named twice\n  name others of {there!r}")
    return axes
