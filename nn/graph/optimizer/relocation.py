"""Relocation: a trained model's tensors brought to where another plan wants them, from shards to shards.

    weights, buffers      of each rank    ->   the same tensors, in other pieces on other ranks
    masters               exact digits    ->   where the optimizer is to change them
    states                moments, counts ->   beside these

Tensors stay the objects that they are: modules, optimizers and users who hold one see it move. Each rank gets the
elements that it needs and does not hold. Nothing is read on ranks that are lost.
"""

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from ....boxing.bundle import refilling
from ....boxing.exchange.execute import token
from ....boxing.exchange.refill import Filling, refill
from ....boxing.survivors import survivors
from ....placement.errors import PlacementError, SbpError, some_of
from ....placement.world import device, owned
from ....sbp import Layout
from ...tensors.handle import plain
from ...tensors.moves import own_shards
from ...tensors.tensor import GlobalTensor, wrap
from .late_mean import late_mean

__all__ = ["LIMIT", "ModelMove", "carried", "filling", "moves_made", "relocated"]

LIMIT = 25 * 2**20  # bytes of a rank on their way at a time
_count = 0


class ModelMove:
    """A model that is to lie as its next plan says, wherever it is now; `lost` ranks have nothing any more."""

    def __init__(self, lost: Collection[int] = ()) -> None:
        self.lost, self.done = frozenset(lost), False


def moves_made() -> int:
    """The number of times that models were moved: while it is the same, tensors lie where they did."""
    return _count


def relocated(values: Iterable[tuple[str, GlobalTensor, Layout]], lost: Collection[int]) -> None:
    """Bring each of these to a layout, in place. All refusals come before anything is sent."""
    all_of = [part for each in values for part in (each, *_mean(*each))]
    going = [(name, x, _plain(there)) for name, x, there in all_of if _plain(x._layout) is not _plain(there)]
    ways = [_way(name, x, there, lost) for name, x, there in going]
    refill(ways, LIMIT, "moved weights")
    global _count
    _count += bool(going)
    for (_, x, there), way in zip(going, ways, strict=True):
        x.data = carried(way, there)


def _mean(name: str, x: GlobalTensor, there: Layout) -> Iterator[tuple[str, GlobalTensor, Layout]]:
    """The mean of late updates, which goes where its parameter does."""
    mean = late_mean(x)
    if isinstance(mean, GlobalTensor):
        yield f"the mean of late updates of {name}", mean, there.with_dtype(mean.dtype)


def filling(name: str, x: GlobalTensor, there: Layout, lost: Collection[int]) -> Filling:
    """The way to fill memory of a layout with a tensor, from ranks that are not lost."""
    return _way(name, x, _plain(there), lost)


def carried(way: Filling, there: Layout) -> GlobalTensor:
    """The tensor in the memory that was filled."""
    return wrap(tuple(way.target.values()) or (token(there),), there)


def _way(name: str, x: GlobalTensor, there: Layout, lost: Collection[int]) -> Filling:
    if x.placement.type != there.placement.type:
        raise PlacementError(
            f"{name} is to move from {x.placement} to {there.placement}, which are devices of another kind\n"
            "  a tensor stays of one kind: flow.save(path, model, ...), and flow.load(path, other, ...) another model"
        )
    if x._layout.state.partial:  # a buffer that ranks add to
        x = wrap(own_shards(x.detach(), _whole(x._layout), "moved weights"), _whole(x._layout))
    src = survivors(x._layout, lost)
    if src is None:
        raise SbpError(
            f"{name} {tuple(x.shape)} is lost: no rank that is left has all of what {_named(x, lost)} held of it\n"
            f"  it lies as {x._layout.lie} on {x.placement}\n"
            "  go on from a checkpoint: flow.load(flow.newest(folder).path, model, optimizer=optimizer)"
        )
    held = {rank: shard.detach() for rank, shard in zip(owned(x.placement), x._shards, strict=False)}
    made = {rank: _empty(there, rank) for rank in owned(there.placement)}
    return Filling(refilling(src, there), {rank: one for rank, one in held.items() if rank in src.placement}, made)


def _named(x: GlobalTensor, lost: Collection[int]) -> str:
    return some_of([f"rank {rank}" for rank in x.placement.flat if rank in lost])


def _empty(of: Layout, rank: int) -> Tensor:
    return torch.empty(of.local_shape(rank), dtype=of.dtype, device=device(of.placement, rank))


def _plain(of: Layout) -> Layout:
    """The same, with nothing said of gradients or of strides."""
    return Layout(of.placement, of.state, of.shape, of.dtype)


def _whole(of: Layout) -> Layout:
    return plain(of).with_state(of.state._replace(partial=(), reduction="sum"))
