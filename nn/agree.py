"""Do ranks mean the same? One small all_gather of numbers that must not differ, so that a difference is an error.

A rank that draws other random numbers, or starts from other weights, would go on with values of its own, and nobody
would notice: what is B is never looked at on two ranks.
"""

from collections.abc import Sequence

import torch

from ..boxing import box
from ..placement import Placement
from ..placement.world import device, owned, world
from ..sbp import B, S, layout

__all__ = ["told"]


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
    (whole,) = box([held], mine, layout(line, B, mine.shape, mine.dtype), op=op)
    return [[number % (1 << 64) for number in each] for each in whole.tolist()]
