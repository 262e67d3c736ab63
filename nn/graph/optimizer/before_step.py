"""A copy of parameters and of what optimizers keep for them, from before a step, to which both can go back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...tensors.tensor import GlobalTensor
from .on_shards import forget
from .trained import Trained

__all__ = ["BeforeStep"]


class BeforeStep:
    """Some parameters as optimizers have them, and their states. It takes as many bytes as these."""

    def __init__(self, trained: Sequence[Trained], optimizers: Sequence[Optimizer]) -> None:
        self.trained, self.optimizers = trained, optimizers
        for each in trained:
            each.gather()  # what others have changed counts
        self.masters = [_copied(each.master) for each in trained]
        self.states = [
            {name: _copied(part) for name, part in optimizer.state.get(each.master, {}).items()}
            for optimizer in optimizers
            for each in trained
        ]

    @property
    def bytes(self) -> int:
        parts = [*self.masters, *(part for state in self.states for part in state.values())]
        return sum(x.nbytes for part in parts for x in (part if isinstance(part, list) else []))

    def restore(self) -> None:
        """Go back, in the same memory; where there was no state, there is none again."""
        with torch.no_grad():
            for each, copies in zip(self.trained, self.masters, strict=True):
                _put(each.master, copies)
                each.master._moved = None
            states = iter(self.states)
            for optimizer in self.optimizers:
                for each in self.trained:
                    kept, now = next(states), optimizer.state.get(each.master)
                    if now is None:
                        continue
                    if not kept:
                        del optimizer.state[each.master]
                        forget(optimizer)
                    for name, copies in kept.items():
                        if isinstance(copies, list):
                            _put(now[name], copies)
                        else:
                            now[name] = copies


def _copied(part: Any) -> Any:
    """Copies of shards, or of the one tensor; a number as it is."""
    if isinstance(part, GlobalTensor):
        return [shard.detach().clone() for shard in part._shards]
    return [part.detach().clone()] if isinstance(part, Tensor) else part


def _put(part: Tensor, copies: list[Tensor]) -> None:
    shards = part._shards if isinstance(part, GlobalTensor) else (part,)
    for shard, copy in zip(shards, copies, strict=True):
        shard.detach().copy_(copy)
