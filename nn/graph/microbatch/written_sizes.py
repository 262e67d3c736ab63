"""Sizes of the batch that are written down in a step, so that it does not run on micro-batches."""

from collections.abc import Sequence

from ....boxing.record import user_line
from ....placement.errors import SbpError
from ....sbp.call import Ref, leaves
from ....sbp.logical import LogicalOp
from .parts import Size

__all__ = ["does_not_run"]


def does_not_run(error: Exception, sizes: Size, small: Size, name: str) -> SbpError:
    """The error for a step that runs on the batch, and failed so on a micro-batch or a slice."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = user_line(trace.tb_frame) if trace is not None else ""
    said = (str(error) or type(error).__name__).splitlines()[0]
    pieces, cuts = f"{small[0]} of {sizes[0]} samples", "micro_batches="
    if len(sizes) > 1:
        cuts += " and slices="
        pieces += f", and {small[1]} of {sizes[1]} tokens of each"
    ops: Sequence[LogicalOp] = getattr(error, "captured", ())
    found = next((pair for op in reversed(ops) if (pair := _written(op, sizes, small))), None)
    cause = ""
    if found is not None:
        number, place = found
        what = "samples the batch has" if number == sizes[0] != small[0] else "tokens a sequence has"
        cause = f"  {number}, as many as {what}, is written down at {place}\n"
    return SbpError(
        f"{name} cuts the batch into parts of {pieces}, and the step does not run on these: at {line}\n"
        f"  {said}\n{cause}"
        "  write it for any number, as in x.view(len(x), -1) and torch.zeros(len(x), 4), and take no sample by its "
        f"number; or leave {cuts} out"
    )


def _written(op: LogicalOp, sizes: Size, small: Size) -> tuple[int, str] | None:
    """A size of the whole that is among an op's arguments, and where."""
    numbers = {n for n in leaves((op.args, op.kwargs), (Ref, int)) if type(n) is int}  # a Ref is of ints too
    for whole, part in zip(sizes, small, strict=True):
        if whole != part and whole in numbers:
            return whole, op.origin.line
    return None
