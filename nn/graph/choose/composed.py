"""Composites put in: ops of modules that notes tell how to compute are replaced by the calls of a composite."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import torch

from ....placement import Placement
from ....placement.errors import PlacementError, SbpError
from ....sbp.call import Ref, fill, mapped, refs_in, tensors_in
from ....sbp.joint.placements import Homes
from ....sbp.logical import Logical, LogicalOp
from ....sbp.traits import traits
from ...composites.axis import Axis, AxisValue, Left
from ...model.inside import CompositeUse

__all__ = ["Uses", "check_uses", "composed"]

SLICED, SLICES_OF = "sbpflow::attend", "scaled_dot_product_attention"
Uses: TypeAlias = Mapping[str, Sequence[CompositeUse]]  # by the path of a module


def check_uses(logical: Logical, uses: Uses) -> None:
    """An error for a note that meets no op in its module; of a list that was noted one of the modules is enough."""
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
        if use is not None and any(there.shape[at] > 1 for at in axes):
            of = partial(_constant, logical)
            axis = Axis(there, axes, op, lambda: next(fresh), use.use, pins, made=of)
            made = _written(logical, names, axis, use)
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


def _written(logical: Logical, names: Mapping[int, str], axis: Axis, use: CompositeUse) -> list[LogicalOp] | Left:
    """The calls of the composite, the last of which make the op's own values; or why it leaves the op."""
    op = axis.op
    values = {n: _value(logical, n, names.get(n, "")) for n in op.inputs}
    args, kwargs = mapped((op.args, op.kwargs), Ref, lambda ref: values[ref.number])
    made = use.composite.written(axis, *args, **kwargs)
    if isinstance(made, Left):
        return made
    results = list(made) if isinstance(made, list | tuple) else [made]
    _check(op, results, use)
    same = {x.number: n for x, n in zip(results, op.numbers, strict=True)}
    renamed = [call.of(same, numbers=tuple(same.get(n, n) for n in call.numbers)) for call in axis.calls]
    return _needed(renamed, set(op.numbers))


def _constant(logical: Logical, number: int) -> torch.Tensor | None:
    """A value that depends on no source, computed; None for any other, and for random numbers."""
    alone = replace(logical, result=Ref(number), losses=(), writes={}).pruned()
    asked = {n for op in alone.ops for n in op.inputs} | {number}
    if not asked.isdisjoint(range(len(alone.sources))) or any(
        torch.Tag.nondeterministic_seeded in op.op.tags for op in alone.ops
    ):
        return None
    values: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for op in alone.ops:
            takes = any(parameter.name == "device" for parameter in op.op._schema.arguments)
            kwargs = {**op.kwargs, "device": torch.device("cpu")} if takes else op.kwargs
            made = tensors_in(op.op(*fill(op.args, values), **fill(kwargs, values)))
            values.update(zip(op.numbers, made, strict=True))
    return values[refs_in(alone.result)[0]]


def _value(logical: Logical, number: int, name: str) -> AxisValue:
    fake = logical.fakes[number]
    like = torch.empty(fake.shape, dtype=fake.dtype, device="meta")
    return AxisValue(number, like, number in logical.wants_grad, name=name)


def _check(op: LogicalOp, results: Sequence[Any], use: CompositeUse) -> None:
    """A refusal of results that are not those of the op."""
    wanted = [(tuple(y.shape), y.dtype) for y in op.outputs]
    found = [(x.shape, x.dtype) if isinstance(x, AxisValue) else type(x).__name__ for x in results]
    if (
        found != wanted
        or any(x.number in op.inputs for x in results)
        or len({x.number for x in results}) < len(results)
    ):
        raise SbpError(
            f"{use}: the composite gives {found}\n  {op.name} makes {wanted}\n"
            "  return what axis.run gave for the op's results, each a value of its own"
        )


def _needed(calls: Sequence[LogicalOp], ends: set[int]) -> list[LogicalOp]:
    """The calls that results depend on."""
    kept: list[LogicalOp] = []
    for call in reversed(calls):
        if not ends.isdisjoint(call.numbers):
            ends.update(call.inputs)
            kept.append(call)
    return kept[::-1]
