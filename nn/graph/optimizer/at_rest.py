"""Memory at rest: the bytes that ranks hold of a model between steps, counted on the tensors themselves."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, UntypedStorage

from ....placement.world import owned
from ...tensors.factories import whole_everywhere
from ...tensors.tensor import GlobalTensor
from .adopted_model import AdoptedModel
from .late_mean import late_mean

__all__ = ["AtRest", "at_rest"]

# By where they lie. They are held, since some are made to be counted, and the next would lie where the last one did.
Memories: TypeAlias = dict[int, UntypedStorage]


@dataclass(frozen=True)
class AtRest:
    """Bytes of one rank between steps: parameters and buffers, gradients left on them, and states of optimizers. States
    include own pieces of parameters that are no views, and means of late updates. Numbers, such as counts of steps, are
    left out, but for those of a parameter that is a number."""

    parameters: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states


def at_rest(model: AdoptedModel) -> dict[int, AtRest]:
    """The memory of every rank that this process owns; storage that two tensors share counts once, for the first."""
    seen: dict[int, Memories] = defaultdict(dict)
    kinds = [_bytes(tensors, seen) for tensors in (model.held.values(), _gradients(model), _states(model))]
    return {rank: AtRest(*(found.get(rank, 0) for found in kinds)) for rank in sorted(seen)}


def _gradients(model: AdoptedModel) -> Iterator[GlobalTensor]:
    masters = (trained.master for trained in model.trained.values())
    for x in (*model.held.values(), *masters):
        if isinstance(x.grad, GlobalTensor):
            yield x.grad


def _states(model: AdoptedModel) -> Iterator[GlobalTensor]:
    yield from (trained.master for trained in model.trained.values())
    yield from (mean for mean in map(late_mean, model.held.values()) if isinstance(mean, GlobalTensor))
    for optimizer in model.optimizers:
        for x, state in optimizer.state.items():
            for name, part in state.items():
                counted = isinstance(part, Tensor) and (part.ndim or (not x.ndim and name != "step"))
                if counted and isinstance(x, GlobalTensor):
                    yield part if isinstance(part, GlobalTensor) else whole_everywhere(part, x.placement)


def _bytes(tensors: Iterable[GlobalTensor], seen: dict[int, Memories]) -> dict[int, int]:
    """Bytes by rank of all memory that was not seen before."""
    found: dict[int, int] = defaultdict(int)
    for x in tensors:
        for rank, shard in zip(owned(x.placement), x._shards, strict=False):
            memory = shard.untyped_storage()
            if memory.data_ptr() not in seen[rank]:
                seen[rank][memory.data_ptr()] = memory
                found[rank] += memory.nbytes()
    return found
