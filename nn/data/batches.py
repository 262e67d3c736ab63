"""Batches: what this process has read of one, as global tensors of all of it."""

from typing import Any

import torch
from torch import Tensor

from ...boxing.exchange.execute import token
from ...placement.errors import DtypeError, ShapeError
from ...placement.structure import replaced, walk
from ...placement.world import device, owned
from ..tensors.tensor import GlobalTensor, wrap
from .reading import Read
from .shares import BatchShares

__all__ = ["global_batch", "values_by_path"]


def values_by_path(value: Any) -> dict[str, Any]:
    """The values of a batch by where they stand in it."""
    return {".".join(map(str, keys)): x for keys, x in walk(value, None)}


def global_batch(read: Read, shares: BatchShares) -> Any:
    """The batch with a global tensor in the place of each tensor."""
    return replaced(read.value, lambda path, x: _global(path, x, read, shares), kind=None)


def _global(path: str, value: Any, read: Read, shares: BatchShares) -> GlobalTensor | None:
    """One tensor of a batch; each rank of this process gets a copy of its part."""
    if value is None:
        return None
    named = f"a batch of flow.data.shards has {path or 'a value'}"
    if not isinstance(value, Tensor):
        raise DtypeError(
            f"{named}, a {type(value).__name__}, of which no rank can have a part\n"
            "  leave it out of what the dataset or its collate_fn returns, or make it a tensor"
        )
    rows = max(len(read.rows), 1)
    if value.ndim == 0 or value.shape[0] != rows:
        raise ShapeError(
            f"{named} {tuple(value.shape)} for {rows} samples\n"
            "  each tensor has the samples of a batch along its first dim; what is the same for all is no part of it"
        )
    shape = list(value.shape)
    shape[0] = read.stop - read.start
    if read.part is not None and len(shape) > 1:
        lo, hi = read.part
        if shape[1] != hi - lo:
            raise ShapeError(
                f"{named} {tuple(value.shape)} of which part(index, {lo}, {hi}) was to give {hi - lo} along dim 1\n"
                "  all tensors of a sample have as many tokens as its dataset's `length`, and part cuts all of them"
            )
        shape[1] = read.length
    of = shares.layout(tuple(shape), value.dtype)
    first = read.part or (0, 0)
    shards = [shares.shard(value, of, rank, read.rows, first) for rank in owned(shares.placement)]
    made = wrap(
        tuple(map(_own, shards, [device(of.placement, rank) for rank in owned(of.placement)])) or (token(of),), of
    )
    return made


def _own(shard: Tensor, where: torch.device) -> Tensor:
    """A part of its own memory where its rank has its tensors; from pinned memory nobody waits for it."""
    if where.type != "cpu":
        return shard.contiguous().to(where, non_blocking=shard.is_pinned())
    return shard.clone(memory_format=torch.contiguous_format)
