"""Do ranks mean the same? One small all_gather of numbers that must not differ, so that a difference is an error.

A rank that draws other random numbers, starts from other weights or reads another batch would go on with values of its
own, and nobody would notice: what is B is never looked at on two ranks. Seeds and weights are compared whenever they
are new. Values passed at every step, such as a batch, and requests of a factory are compared in the first steps, and
then now and then. An op that sends compares what it moves; so what ranks did otherwise before shows there if shapes,
dtypes or signatures differ, and not if only numbers do.
"""

import threading
from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from ...boxing import box
from ...boxing.record import comparing, user_line
from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import at_close, device, owned, world
from ...sbp import B, P, S, layout

__all__ = ["added", "checksum", "in_order", "same", "same_call", "told"]

FIRST, EVERY = 3, 64  # calls of a line whose values are compared: so many, and then one of so many

in_order: set[int] = set()  # threads that run in one order everywhere, such as the main thread
_calls: dict[tuple[Placement, str], int] = {}


def told(row: Sequence[int], where: Placement, op: str) -> list[list[int]] | None:
    """Every rank's row of numbers, of 64 bits each, on every rank of the placement.

    None where there is nobody to disagree with: one process that plays all ranks, or one rank alone.
    """
    here = owned(where)
    if world().rank is None or where.size == 1 or not here:
        return None
    line = Placement(where.type, where.flat, (where.size,), None)
    mine = layout(line, S(0), (where.size, len(row)), torch.int64)
    signed = [number - (1 << 64) if number >> 63 else number for number in row]
    held = torch.tensor([signed], device=device(where, here[0]))
    with comparing(op):
        (whole,) = box([held], mine, layout(line, B, mine.shape, mine.dtype), op=op)
    return [[number % (1 << 64) for number in each] for each in whole.tolist()]


def added(row: Sequence[int], where: Placement, op: str) -> list[int]:
    """The sums of every rank's row of numbers, modulo 2**64, on every rank of the placement."""
    here = owned(where)
    if world().rank is None or where.size == 1 or not here or not row:
        return [number % (1 << 64) for number in row]
    line = Placement(where.type, where.flat, (where.size,), None)
    addends = layout(line, P, (len(row),), torch.int64)
    signed = [number - (1 << 64) if number >> 63 else number for number in row]
    held = torch.tensor(signed, device=device(where, here[0]))
    with comparing(op):
        (whole,) = box([held], addends, addends.to(B), op=op)
    return [number % (1 << 64) for number in whole.tolist()]


def same(values: Mapping[str, Tensor], where: Placement, asked: str, said: str = "") -> None:
    """Refuse plain values, each passed as one by every process of a placement, that differ between ranks.

    `asked` is who takes them, and where; `said` is what else must be alike, such as the signature.
    """
    if not (values and _compares(where) and _is_due(where, asked)):
        return
    other, at = _differs([checksum(value, said) for value in values.values()], where, "same values")
    if other is None:
        return
    name, mine = [*values.items()][at]
    place, lie = f" in {name}" if name else "", f" as {said}" if said else ""
    raise SbpError(
        f"{asked}: ranks {where.flat[0]} and {other} passed different values{place}\n"
        f"  here {tuple(mine.shape)} {mine.dtype}{lie}; each rank passes the same whole value\n"
        "  seed the loader alike on every rank and leave out DistributedSampler: sbp=S(0) gives each rank its share\n"
        "  or, where each rank reads a share of its own: flow.from_local(share, placement=..., sbp=S(0))\n"
        "  flow.init(check=False) leaves out this comparison"
    )


def same_call(
    name: str,
    arguments: tuple[object, ...],
    sbp: object,
    dtype: object,
    generator: torch.Generator | None,
    where: Placement,
) -> None:
    """Refuse a factory that ranks call with other arguments, or with generators of their own that differ."""
    if not _compares(where):
        return
    asked = f"flow.{name} at {user_line()}"
    if not _is_due(where, asked):
        return
    said = f"{name}({', '.join(map(str, arguments))}, sbp={sbp}, dtype={dtype})"
    state = b"" if generator is None else generator.get_state().numpy().tobytes()
    other, at = _differs([crc32(said.encode()), crc32(state)], where, "same factory")
    if other is not None:
        what = "other arguments" if at == 0 else "a generator in another state, or another seed="
        raise SbpError(
            f"{asked}: ranks {where.flat[0]} and {other} called it with {what}\n"
            f"  here {said}; each rank makes its part of one tensor, so that all say the same\n"
            "  what each rank has of its own: flow.from_local(part, placement=..., sbp=...)\n"
            "  flow.init(check=False) leaves out this comparison"
        )


def _compares(where: Placement) -> bool:
    """Whether this process has others to compare with.

    Only the main thread of a program, and who runs what that has launched, has its calls in the same order everywhere,
    so nothing is compared on others.
    """
    if world().rank is None or not world().check or where.size == 1:
        return False
    return threading.current_thread() is threading.main_thread() or threading.get_ident() in in_order


def _is_due(where: Placement, asked: str) -> bool:
    """Whether this call of a line is one that ranks compare."""
    if not _calls:
        at_close(_calls.clear)
    number = _calls[where, asked] = _calls.get((where, asked), 0) + 1
    return number <= FIRST or number % EVERY == 0


def _differs(row: Sequence[int], where: Placement, op: str) -> tuple[int | None, int]:
    """A rank whose numbers are not those of the first, if there is one, and which number that is."""
    rows = told(row, where, op) or [list(row)]
    for at, sums in enumerate(zip(*rows, strict=True)):
        for rank, number in zip(where.flat, sums, strict=False):
            if number != sums[0]:
                return rank, at
    return None, 0


def checksum(value: Tensor, said: str = "") -> int:
    """A checksum of the shape, the dtype and some thousand elements."""
    line = value.detach().reshape(-1)
    some = line[:: max(len(line) // 4096, 1)].cpu().contiguous().view(torch.uint8)
    return crc32(some.numpy().tobytes(), crc32(f"{value.dtype} {tuple(value.shape)} {said}".encode()))
