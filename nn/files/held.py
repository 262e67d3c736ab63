"""Tensors as processes hold them: the boxes that this one writes, and the numbers in a box that it has.

What is partial is added up first, where each rank keeps what it has an addend of.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...boxing import box
from ...placement.world import owned, world
from ...sbp import Layout
from ...sbp.state import State
from ..tensors.tensor import GlobalTensor
from .pieces import Shares, sizes_of
from .values import Region

__all__ = ["added_up", "me", "part_in", "part_of", "shares", "written_here"]


def me() -> int:
    """The number of this process."""
    return world().rank or 0


def shares() -> Shares:
    """The shares of the processes that there are: one a rank, or one that plays all."""
    alone = world().rank is None
    return Shares(lambda rank: 0 if alone else rank)


def written_here(of: Layout) -> list[Region]:
    """The boxes of a tensor that this process writes, so that all write each element once."""
    return shares().of(of).get(me(), [])


def part_of(of: Layout, shards: Sequence[Tensor], region: Region) -> Tensor:
    """The numbers in a box of which this process has all, in the memory of a shard."""
    if not all(sizes_of(region)):
        return shards[0].new_empty(sizes_of(region))
    for rank, shard in zip(owned(of.placement), shards, strict=False):
        found = part_in(of, rank, shard, region)
        if found is not None:
            return found
    raise AssertionError(f"no shard here has {region} of {of}")


def part_in(of: Layout, rank: int, shard: Tensor, region: Region) -> Tensor | None:
    """A box of the whole in the shard of a rank; None where that has not all of it in a row."""
    part = shard.detach()
    for d, ((lo, hi), spans) in enumerate(zip(region, of.spans(rank), strict=True)):
        start = 0
        for first, last in spans:
            if first <= lo and hi <= last:
                part = part.narrow(d, start + lo - first, hi - lo)
                break
            start += last - first
        else:
            return None
    return part


def added_up(x: GlobalTensor, op: str) -> tuple[Layout, tuple[Tensor, ...]]:
    """The layout and shards of a tensor without addends."""
    of, shards = x._layout, tuple(shard.detach() for shard in x._shards)
    if not of.state.partial:
        return of, shards
    there = of.with_state(State(of.state.dims))
    with torch.no_grad():
        return there, tuple(box(shards, of.with_state(of.state), there, op=op))
