"""Written calls: a composite run for an op of a graph, on its own axes, and checked to make the same."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...placement.errors import SbpError
from ...placement.structure import mapped
from ...sbp.call import Ref, fill, refs_in, tensors_in
from ...sbp.logical import Logical, LogicalOp
from ..model.inside import CompositeSite, CompositeUse, Left
from .axis import Axis, AxisValue

__all__ = ["calls_of"]


def calls_of(written: Callable[..., Any], site: CompositeSite) -> list[LogicalOp] | Left:
    """The calls of the composite, the last of which make the op's own values; or why it leaves the op."""
    op, use, logical, names = site.op, site.use, site.logical, site.names
    axis = Axis(
        site.placement, site.axes, op, site.fresh, use.use, site.pins, made=lambda number: _constant(logical, number)
    )
    values = {n: _value(logical, n, names.get(n, "")) for n in op.inputs}
    args, kwargs = mapped((op.args, op.kwargs), Ref, lambda ref: values[ref.number])
    made = written(axis, *args, **kwargs, **use.settings)
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
