"""A step captured for a micro-batch beside the same one captured for the batch: their ops one by one."""

from dataclasses import replace
from typing import Any

from ....placement.errors import SbpError
from ....sbp.call import Call, Ref
from ....sbp.logical import Logical, LogicalOp
from ....sbp.traits import traits

__all__ = ["name_of", "of_batch", "paired"]


def name_of(op: LogicalOp) -> str:
    """An op as rules name it."""
    return Call(op.op, (), {}, ()).name


def paired(logical: Logical, whole: Logical) -> tuple[Logical, list[LogicalOp]]:
    """The batch's step, and for each op of the micro-batch's the same one of it.

    It may have more that do nothing for one sample. It lacks what takes as many rows of a table as there are tokens, if
    the table has no more: that is put in.
    """
    pairs = _Pairs(logical, whole)
    for op in logical.ops:
        pairs.find(op)
    return pairs.done()


class _Pairs:
    def __init__(self, logical: Logical, whole: Logical) -> None:
        self.logical, self.whole = logical, whole
        self.same = {n: n for n in range(len(whole.sources))}  # values of the micro-batch -> those of the batch
        self.alias: dict[int, int] = {}  # results of ops that do nothing, or were put in -> what these were given
        self.fakes = dict(whole.fakes)
        self.ops: list[LogicalOp] = []
        self.found: list[LogicalOp] = []
        self.at = 0

    def find(self, op: LogicalOp) -> None:
        left = self.whole.ops[self.at :]
        idle = next((n for n, other in enumerate(left) if self.fits(op, other) or not _idle(other)), len(left))
        other = left[idle] if idle < len(left) else None
        if other is None or not self.fits(op, other):
            if not self.takes_all(op):
                raise _differs(op, other)
            mine = self.put_in(op)
        else:
            for one in left[:idle]:
                self.alias[one.numbers[0]] = one.inputs[0]
            self.ops += left[:idle]
            self.at += idle + 1
            mine = self.renamed(op, other)
        self.ops.append(mine)
        self.found.append(mine)
        self.same.update(zip(op.numbers, mine.numbers, strict=True))

    def fits(self, op: LogicalOp, other: LogicalOp) -> bool:
        one = not _slices(op) or self.first(other.inputs[0]) == self.first(self.same[op.inputs[0]])
        return one and _same(op, other)

    def first(self, number: int) -> int:
        while number in self.alias:
            number = self.alias[number]
        return number

    def takes_all(self, op: LogicalOp) -> bool:
        """Whether an op may have nothing to do for the batch, as it takes what there is from the first on."""
        bound = self.logical.call(op).bound if _slices(op) else {}
        return bool(bound) and bound["step"] == 1 and not bound["start"]

    def put_in(self, op: LogicalOp) -> LogicalOp:
        number, given = max(self.fakes) + 1, self.same[op.inputs[0]]
        y, dim = self.fakes[given], self.logical.call(op).bound["dim"]
        self.fakes[number], self.alias[number] = y, given
        return replace(op, args=(Ref(given), dim, 0, y.shape[dim]), kwargs={}, outputs=(y,), numbers=(number,))

    def renamed(self, op: LogicalOp, other: LogicalOp) -> LogicalOp:
        """An op of the batch with what was put in."""
        put_in = {
            theirs: self.same[mine]
            for mine, theirs in zip(op.inputs, other.inputs, strict=False)
            if self.alias.get(self.same[mine]) == theirs
        }
        return other.of(put_in) if put_in else other

    def done(self) -> tuple[Logical, list[LogicalOp]]:
        left = self.whole.ops[self.at :]
        more = next((other for other in left if not _idle(other)), None)
        if more is not None:
            raise _differs(None, more)
        return replace(self.whole, ops=(*self.ops, *left)), self.found


def _slices(op: LogicalOp) -> bool:
    return name_of(op) == "slice.Tensor"


def _same(op: LogicalOp, other: LogicalOp) -> bool:
    """Whether two ops are one, of a micro-batch and of the batch: sizes differ by the samples alone."""
    outputs = list(zip(op.outputs, other.outputs, strict=False))
    alike = all(x.ndim == y.ndim and x.dtype == y.dtype for x, y in outputs)
    alike = alike and len(op.outputs) == len(other.outputs)
    return (
        op.op is other.op and alike and all(n <= m for x, y in outputs for n, m in zip(x.shape, y.shape, strict=True))
    )


def _differs(op: LogicalOp | None, other: LogicalOp | None) -> SbpError:
    def told(one: LogicalOp | None) -> str:
        return "nothing" if one is None else f"{name_of(one)} at {one.origin.line or 'no line'}"

    if op is not None and other is not None and op.op is other.op and len(op.outputs) != len(other.outputs):
        return SbpError(
            f"{name_of(op)} at {op.origin.line or 'no line'} makes {len(other.outputs)} tensors of the batch, and "
            f"{len(op.outputs)} of a micro-batch\n"
            "  it takes samples one by one, or several at a time: write it on all of them at once; or leave "
            "micro_batches= out"
        )
    return SbpError(
        f"the step does {told(other)} for the batch, and {told(op)} for a micro-batch\n"
        "  what it does must not depend on how many samples or tokens there are; or leave micro_batches= out"
    )


def _idle(op: LogicalOp) -> bool:
    """Whether an op of the batch may have nothing to do for a single sample."""
    return "idle" in traits(name_of(op))


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
