"""`refit`: the weights of one model into another, such as from a trainer to those that generate with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from ...boxing.boxing import Boxing
from ...boxing.bundle import refilling
from ...boxing.exchange.refill import Filling, refill
from ...boxing.graph.physical import in_narrower
from ...boxing.routes.bound import least_sent
from ...placement.errors import SbpError
from ...placement.world import owned
from ..model.reading import read_by_forwards, rewriting
from ..model.values.same_values import ranks_of
from ..tensors.tensor import GlobalTensor
from .changes import RankShards, changed, refuse_overflow, sent
from .names import NewNames, lies, paired

__all__ = ["Refitted", "refit"]


@dataclass(frozen=True)
class Refitted:
    """The report of a refit: tensors that were sent, in so many buckets, and those left as they were.

    `bytes` are those that all ranks sent, `most` those that the busiest received; `bound` those that no way of sending
    can do without. `unused` are names of the source for which the target has no place.
    """

    tensors: int
    bytes: int
    most: int
    buckets: int
    unchanged: int = 0
    unused: tuple[str, ...] = ()
    plans: tuple[Boxing, ...] = field(default=(), repr=False)

    @cached_property
    def bound(self) -> int:
        return sum(least_sent(plan.src, plan.dst) for plan in self.plans)

    def __str__(self) -> str:
        text = f"{_counted(self.tensors, 'tensor')} in {_counted(self.buckets, 'bucket')}: {_size(self.bytes)} sent"
        text += f" (bound {_size(self.bound)}), {_size(self.most)} to the busiest rank"
        text += f"; {self.unchanged} unchanged" if self.unchanged else ""
        return text + (f"; not taken: {', '.join(self.unused)}" if self.unused else "")


def refit(
    source: nn.Module,
    target: nn.Module,
    *,
    names: NewNames | None = None,
    only_changed: bool = False,
    bucket_bytes: int = 25 * 2**20,
) -> Refitted:
    """Give a model the weights of another, whatever the plans of the two, and tell what was sent.

    Parameters and persistent buffers, tied ones once; floats become the target's dtype, and travel in the narrower one.
    Each rank gets what it needs and does not hold, straight into the memory of the target, and has at most
    `bucket_bytes` on their way at a time. `names` says what is called otherwise in the target: a dict from names of
    the source, or patterns with stars, to names of the target, or a function; None is not sent. With `only_changed`
    a tensor is sent only if it, or the target's, is not what it was after the last refit of these two models.

    It is one event for other threads: compiled steps and forwards of the target have all of the old weights or all of
    the new ones. It waits for those that run, and they for it; `flow.nn.reading` is for what takes several.

    Every process that has a rank of either model calls it; one of neither may. Whatever is refused is so before
    anything is sent. Optimizers are no part of it: where one trains the target, it goes on from the new weights.
    """
    if bucket_bytes < 1:
        raise SbpError(f"flow.refit: bucket_bytes={bucket_bytes} holds nothing\n  say how many may be on their way")
    pairs, unused = paired(source, target, names)
    ends = [in_narrower(lies(pair.source), lies(pair.target)) for pair in pairs]
    held = [(_shards(pair.source), _shards(pair.target)) for pair in pairs]
    everybody = ranks_of((x.placement for pair in ends for x in pair), "cpu")
    going = list(range(len(pairs)))
    if everybody is not None and pairs:
        refuse_overflow(pairs, held, everybody)
        if only_changed:
            going = [at for at, new in enumerate(changed(source, target, pairs, held, everybody)) if new]
    plans = [refilling(*ends[at]) for at in going]
    fillings = [Filling(plan, *held[at]) for plan, at in zip(plans, going, strict=True)]
    read_by_forwards(target)
    with rewriting([pairs[at].target for at in going], [pairs[at].source for at in going]):
        buckets = refill(fillings, bucket_bytes, "refit")
        for at in going:
            value = pairs[at].target
            if isinstance(value, GlobalTensor):
                value._moved = None
        if only_changed:
            sent(source, target, [pairs[at] for at in going], [held[at] for at in going])
    return Refitted(
        len(going), sum(p.total for p in plans), _busiest(plans), buckets, len(pairs) - len(going), tuple(unused),
        tuple(plans),
    )  # fmt: skip


def _shards(x: Tensor) -> RankShards:
    if not isinstance(x, GlobalTensor):
        return {0: x.detach()}
    return {rank: shard.detach() for rank, shard in zip(owned(x.placement), x._shards, strict=False)}


def _busiest(plans: Sequence[Boxing]) -> int:
    got: dict[int, int] = {}
    for plan in plans:
        for rank in plan.ranks:
            got[rank] = got.get(rank, 0) + plan.received(rank)
    return max(got.values(), default=0)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
