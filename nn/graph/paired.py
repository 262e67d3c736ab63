"""A step captured for a micro-batch beside the same one captured for the batch: their ops one by one."""

from dataclasses import replace
from typing import Any

from ...placement.errors import SbpError
from ...sbp.call import Call
from ...sbp.logical import Logical, LogicalOp

__all__ = ["name_of", "of_batch", "pairs"]


def name_of(op: LogicalOp) -> str:
    """An op as rules name it."""
    return Call(op.op, (), {}, ()).name


def pairs(logical: Logical, whole: Logical) -> list[LogicalOp]:
    """For each op the same one of the batch's step, which may have more that do nothing for one sample."""
    found: list[LogicalOp] = []
    left = iter(whole.ops)
    for op in logical.ops:
        other = next(left, None)
        while other is not None and not _same(op, other) and _idle(other):
            other = next(left, None)
        if other is None or not _same(op, other):
            raise _differs(op, other)
        found.append(other)
    for other in left:
        if not _idle(other):
            raise _differs(None, other)
    return found


def _same(op: LogicalOp, other: LogicalOp) -> bool:
    """Whether two ops are one, of a micro-batch and of the batch: sizes differ by the samples alone."""
    outputs = list(zip(op.outputs, other.outputs, strict=False))
    alike = all(x.ndim == y.ndim and x.dtype == y.dtype for x, y in outputs)
    return (
        op.op is other.op and alike and all(n <= m for x, y in outputs for n, m in zip(x.shape, y.shape, strict=True))
    )


def _differs(op: LogicalOp | None, other: LogicalOp | None) -> SbpError:
    def told(one: LogicalOp | None) -> str:
        return "nothing" if one is None else f"{name_of(one)} at {one.origin.line or 'no line'}"

    return SbpError(
        f"the step does {told(other)} for the batch, and {told(op)} for a micro-batch\n"
        "  what it does must not depend on how many samples there are; or leave micro_batches= out"
    )


def _idle(op: LogicalOp) -> bool:
    """Whether an op of the batch may have nothing to do for a single sample."""
    return name_of(op) in ("expand", "contiguous", "clone", "view", "reshape", "_unsafe_view")


def of_batch(op: LogicalOp, other: LogicalOp) -> LogicalOp:
    """An op with the numbers of the batch's step where they are values and not sizes."""
    kinds = {p.name: str(p.type) for p in op.op._schema.arguments}
    order = list(kinds)

    def value(name: str, mine: Any, theirs: Any) -> Any:
        number = isinstance(mine, int | float) and isinstance(theirs, int | float) and not isinstance(mine, bool)
        computes = "Tensor" in kinds[name] or kinds[name] in ("number", "float")
        return theirs if number and computes and (op.inputs or name in ("fill_value", "s")) else mine

    listed = zip(order, op.args, other.args, strict=False)
    args = tuple(value(*three) for three in listed)
    return replace(op, args=args, kwargs={n: value(n, mine, other.kwargs.get(n)) for n, mine in op.kwargs.items()})
