"""Steps that are left out, on all ranks alike, because a loss or a gradient is not finite on one of them.

    loss, gradients  ->  finite on all ranks?  yes   the optimizers step
                                               no    nobody steps, and it is told where it was seen

One number is told around each step; only where it is bad is it looked for, and told, in which gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ....boxing import box
from ....placement import Placement
from ....placement.world import device, owned
from ....sbp import Layout, State
from ..compiler.generated_calls import Shards
from .loss_scale import overflowed

__all__ = ["SkippedSteps", "spoilt"]

HeldShards: TypeAlias = tuple[Placement, Shards]  # a value's shards that are owned here
NAMED = 4  # gradients that a text names


@dataclass
class SkippedSteps:
    """The steps of a graph that were left out: their count, and the values that were not finite in the last.

    Processes that have no part in the graph are not told. `gradients` are names of parameters, in the model's order. A
    gradient that is not finite spoils those of all layers below it: the last of them is the first that had it, unless
    the loss itself is not finite, or a weight was bad before.
    """

    count: int = 0
    loss: bool = False
    gradients: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # that saw it in what they hold

    def overflow(self) -> None:
        """Count a step that the loss scale of fp16 has left out."""
        self.count, self.loss, self.gradients, self.weights, self.ranks = self.count + 1, False, (), (), ()

    @property
    def first(self) -> str:
        """The value that was not finite first, as far as it can be told."""
        if self.weights:
            return f"the weight {self.weights[0]}, before the step"
        if self.loss or not self.count:
            return "the loss" if self.loss else ""
        return f"the gradient of {self.gradients[-1]}" if self.gradients else "an overflow of the loss scale"

    def __str__(self) -> str:
        if not self.count:
            return "no step was left out"
        if not self.ranks:
            return f"{self.count} step{'s' * (self.count > 1)} left out; the last by the loss scale"
        found = [f"the gradient of {name}" for name in self.gradients[-NAMED:]]
        found += [f"and {len(self.gradients) - NAMED} more"] * (len(self.gradients) > NAMED)
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        told = ", ".join([*["the loss"] * self.loss, *found])
        steps = f"{self.count} step{'s' * (self.count > 1)}"
        return f"{steps} left out; not finite in the last: {told}, on {where}; first: {self.first}"


def spoilt(
    losses: Sequence[HeldShards],
    grads: Mapping[str, HeldShards],
    weights: Mapping[str, HeldShards],
    ranks: Placement,
    skipped: SkippedSteps,
) -> bool:
    """Whether the step is to be left out, which is noted then; all `ranks`, in a line, are told the same."""
    if not overflowed([*losses, *grads.values()], ranks):
        return False
    skipped.count += 1
    parts: dict[str, list[tuple[str, Sequence[HeldShards]]]] = {"loss": [("", losses)]}
    parts.update(gradients=_each(grads), weights=_each(weights))
    names = [(kind, name) for kind, listed in parts.items() for name, _ in listed]
    flags = [_flags([held for listed in parts.values() for _, held in listed], ranks, rank) for rank in owned(ranks)]
    bad = _told(flags, ranks)
    found = {kind: tuple(n for at, (k, n) in enumerate(names) if k == kind and bad[:, at].any()) for kind in parts}
    skipped.loss, skipped.gradients, skipped.weights = bool(found["loss"]), found["gradients"], found["weights"]
    skipped.ranks = tuple(rank for at, rank in enumerate(ranks.flat) if bad[at].any())
    return True


def _each(held: Mapping[str, HeldShards]) -> list[tuple[str, Sequence[HeldShards]]]:
    return [(name, [each]) for name, each in held.items()]


def _flags(held: Sequence[Sequence[HeldShards]], ranks: Placement, rank: int) -> Tensor:
    """For each value one, if what this rank holds of it is not finite."""
    found = []
    for pairs in held:
        mine = [x for where, shards in pairs for r, x in zip(owned(where), shards, strict=False) if r == rank]
        found.append(any(not bool(x.isfinite().all()) for x in mine))
    return torch.tensor([found], dtype=torch.float32, device=device(ranks, rank))


def _told(flags: list[Tensor], ranks: Placement) -> Tensor:
    """The flags of all ranks, a row each."""
    if not flags:
        return torch.zeros(ranks.size, 0, device="cpu")
    many = flags[0].shape[1]
    rows = Layout(ranks, State(((0,), ()) if ranks.size > 1 else ((), ())), (ranks.size, many), torch.float32)
    whole = Layout(ranks, State(((), ())), (ranks.size, many), torch.float32)
    return box(flags, rows, whole, op="not finite")[0].cpu()
