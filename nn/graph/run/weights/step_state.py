"""The state of a step under way, which threads hold as their work and which nothing is in between two steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from .....placement import Placement
from ...compiler.generated_calls import Shards
from ...microbatch.batch import PieceKind

__all__ = ["NO_STEP", "LateEnd", "StepState", "Sums", "Update", "Validation", "VariantKey"]

VariantKey: TypeAlias = tuple[int, PieceKind]  # of a variant: its route and kind
Sums: TypeAlias = dict[str, list[Tensor]]  # gradients of weights, of all micro-batches so far
Update: TypeAlias = Callable[[Mapping[str, Shards]], None]  # an optimizer's step with these gradients, in place


class Validation(Protocol):
    """An optimizer's steps chunk by chunk, before all is known of the gradients of others."""

    def known(self, chunk: int, grads: Mapping[str, Shards], losses: Sequence[tuple[Placement, Shards]]) -> Tensor:
        """The numbers of the gradients of one chunk, and of losses that it made, as addends."""

    def step(self, chunk: int, known: Tensor) -> None:
        """Step a chunk by what is known so far."""

    def validate(self, chunk: int, known: Tensor) -> None:
        """Make good what was done to it, now that all is known."""

    def undo(self) -> Sequence[int]:
        """Take back what was done in a step that an error has ended; the chunks of which that cannot be."""


class LateEnd(Protocol):
    """The end of a step that needs all micro-batches at once."""

    def come(self, values: Sequence[Mapping[str, Shards]], shards: Sequence[dict[str, Shards]]) -> None:
        """Some results have come: where that is all, its own, and the gradients that micro-batches start from."""


@dataclass(eq=False)
class StepState:
    """The weights that are there, by what they are changed meanwhile, and what is there of micro-batches."""

    held: Mapping[str, Shards]
    update: Update
    validation: Validation | None
    grad: bool  # whether whoever called the step has gradients
    sums: Mapping[VariantKey, Sums]
    values: list[dict[str, Shards]]  # results by micro-batch
    late: LateEnd | None = None
    shards: list[dict[str, Shards]] = field(default_factory=list)  # sources by micro-batch


def _forgotten(grads: Mapping[str, Shards]) -> None:
    raise AssertionError("an update after the end of a step")


NO_STEP = StepState({}, _forgotten, None, False, {}, [])
