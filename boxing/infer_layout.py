"""`layout_of`: the layout of pieces that ranks hold already, after all of them have compared notes.

Each rank tells the others the dtype, shape, strides and signature of its piece, in one small all_gather; from the same
table every rank then draws the same conclusion, so that a misfit is one error everywhere and nobody is left waiting.
"""

from collections.abc import Sequence
from zlib import crc32

import torch
from torch import Tensor

from ..placement import Placement
from ..placement.errors import DtypeError, SbpError, ShapeError
from ..placement.world import owned
from ..sbp import Layout, S, Sbp, SbpLike, layout, signature
from ..sbp.signature import Split
from .box import box
from .memory import as_laid_out

__all__ = ["layout_of"]

MAX_DIMS = 16
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def layout_of(
    shards: Sequence[Tensor],
    placement: Placement,
    sbp: SbpLike,
    shape: tuple[int, ...] | None = None,
    grad_sbp: SbpLike | None = None,
) -> Layout:
    """The layout of a tensor of which this process holds `shards`, one for each rank that it owns, in memory too.

    The logical shape follows from the pieces where it is not given. A process that owns none of the ranks gives it.

    >>> from ..placement import placement
    >>> layout_of([torch.ones(3, 2), torch.ones(2, 2)], placement("cpu:[0-1]"), "S(0)")
    float32 (5, 2) as (S(0),) on cpu:[0-1]
    """
    here = owned(placement)
    if not here:
        if shape is None:
            raise ShapeError(
                f"layout_of on {placement!r}: this process owns none of its ranks and cannot know the shape\n"
                "  pass shape=(...) there"
            )
        return layout(placement, sbp, shape, shards[0].dtype if shards else torch.float32, grad_sbp)
    if len(shards) != len(here):
        raise ShapeError(
            f"layout_of: {len(shards)} shards for ranks {list(here)}\n  pass one tensor for each, in order"
        )
    entries = signature(sbp, placement)
    table = _compare([_describe(shard, entries, shape) for shard in shards], placement)
    _agree(table, placement, entries)
    dtype = DTYPES[table[0][0]]
    pieces = {rank: tuple(row[4 : 4 + row[1]]) for rank, row in zip(placement.flat, table, strict=True)}
    found = layout(placement, entries, shape or _whole(pieces, placement, entries), dtype, grad_sbp)
    for rank, piece in pieces.items():
        if piece != found.local_shape(rank):
            raise ShapeError(
                f"rank {rank} holds a piece of shape {piece}\n"
                f"  {found} gives it {found.local_shape(rank)}\n"
                "  splits are balanced, early ranks take the remainder; cut the whole as layout.slices(rank) says, "
                "or use scatter(whole, layout)"
            )
    strides = (row[4 + MAX_DIMS : 4 + MAX_DIMS + row[1]] for row in table)
    return as_laid_out(found, zip(pieces.values(), strides, strict=True))


def _describe(shard: Tensor, entries: tuple[Sbp, ...], shape: tuple[int, ...] | None) -> list[int]:
    if shard.ndim > MAX_DIMS:
        raise ShapeError(f"layout_of: {shard.ndim} dims, {MAX_DIMS} at most")
    row = [DTYPES.index(shard.dtype), shard.ndim, crc32(repr(entries).encode()), crc32(repr(shape).encode())]
    left = [0] * (MAX_DIMS - shard.ndim)
    return [*row, *shard.shape, *left, *shard.stride(), *left]


def _compare(rows: list[list[int]], placement: Placement) -> list[list[int]]:
    """Every rank's row, on every rank. Numbers travel from the memory of the placement's devices."""
    line = Placement(placement.type, placement.flat, (placement.size,), None)
    mine = layout(line, S(0), (placement.size, len(rows[0])), torch.int64)
    whole = box([torch.tensor([row], device=placement.type) for row in rows], mine, mine.to("B"), op="layout_of")[0]
    return whole.tolist()


def _agree(table: list[list[int]], placement: Placement, entries: tuple[Sbp, ...]) -> None:
    first = table[0]
    for rank, row in zip(placement.flat[1:], table[1:], strict=True):
        zero = placement.flat[0]
        if row[0] != first[0]:
            raise DtypeError(
                f"rank {zero} holds {DTYPES[first[0]]}, rank {rank} {DTYPES[row[0]]}\n"
                "  one tensor has one dtype; convert the pieces first"
            )
        if row[1] != first[1]:
            raise ShapeError(
                f"rank {zero} holds {first[1]} dims, rank {rank} {row[1]}\n  one tensor has one number of dims"
            )
        if row[2] != first[2]:
            raise SbpError(f"ranks {zero} and {rank} gave different signatures\n  one of them sbp={entries}")
        if row[3] != first[3]:
            raise ShapeError(f"ranks {zero} and {rank} gave different shapes\n  pass the same logical shape everywhere")


def _whole(pieces: dict[int, tuple[int, ...]], placement: Placement, entries: tuple[Sbp, ...]) -> tuple[int, ...]:
    """The logical shape: on each dim the pieces along the axes that split it, added up."""
    ndim = len(next(iter(pieces.values())))
    shape = []
    for dim in range(ndim):
        axes = tuple(a for a, e in enumerate(entries) if isinstance(e, Split) and e.dim % ndim == dim)
        shape.append(sum(pieces[rank][dim] for rank in placement.group(axes, placement.flat[0])))
    return tuple(shape)
