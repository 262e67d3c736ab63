"""Rows of a global batch: the part that a micro-batch has, without a move where ranks hold rows of every micro-batch.

    8 samples, two micro-batches, two ranks      S(0)              ranks hold 0123 and 4567
                                                 [all 2, data]                 01 45 and 23 67

In the second each rank has its share of every micro-batch, as `flow.data.shards(..., micro_batches=2)` gives them.
"""

from torch import Tensor

from ....sbp import Layout
from ....sbp.state import State, trim
from ...tensors.tensor import GlobalTensor, wrap

__all__ = ["held_rows", "in_runs"]


def in_runs(x: Tensor, size: int) -> Layout | None:
    """A run's layout, of so many rows, if a global tensor has a whole number of runs and every rank its share."""
    if not isinstance(x, GlobalTensor) or not x.ndim or not size or x.shape[0] % size:
        return None
    of, many = x._layout, x.shape[0] // size
    factors = of.state.dims[0]
    if factors[:1] != (-many,):
        return None
    state = State((trim(factors[1:]), *of.state.dims[1:]), of.state.partial, of.state.reduction)
    return Layout(of.placement, state, (size, *of.shape[1:]), of.dtype)


def held_rows(x: GlobalTensor, there: Layout, start: int) -> GlobalTensor:
    """The run that begins at a row: a part of each shard."""
    at, many = start // there.shape[0], x.shape[0] // there.shape[0]
    shards = []
    for shard in x._shards:
        rows = shard.shape[0] // many if shard.ndim else 0
        shards.append(shard.detach().narrow(0, at * rows, rows) if shard.ndim == len(there.shape) else shard)
    return wrap(tuple(shards), there)
