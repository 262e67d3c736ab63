"""Proved pipelines: the network of a step of micro-batches under a schedule, which ends; and what is asked of it before
anything is made to run.

Actors may be added to the network until then: who added them gives it opened.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from ....actors.protocol.feasibility import proved
from ....actors.protocol.network import Actor, Network
from ....actors.protocol.simulate import Simulation
from ....actors.runtime.answers import Answers
from ....actors.runtime.channel import Carrier, Link
from ....actors.runtime.partition import RegisterEnd
from ....actors.runtime.runtime import settled
from ....actors.schedules.schedule import Schedule
from ....placement import Placement
from ..instructions.order import moved_again
from ..lower.segments import Draw
from ..microbatch.batch import PieceKind
from ..tasks.chunks import Chunks
from ..tasks.task import Tasks
from .network import Lowered, links_of, lowered
from .variant import Variant
from .weights.step_state import VariantKey
from .weights.weights import Fire, Weights

__all__ = ["OpenNetwork", "ProvedPipeline"]


class OpenNetwork(Protocol):
    """The network as it is to run, what was added to that of the step, and what it changes."""

    @property
    def base(self) -> Network: ...
    @property
    def network(self) -> Network: ...
    @property
    def proof(self) -> Simulation: ...
    @property
    def places(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def initial(self) -> Mapping[str, Callable[[], Sequence[Any]]]: ...
    @property
    def legs(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """By register of the step that is led through others, all that holds the same, and where it lies."""

    @property
    def agreed(self) -> Network:
        """The network under a name that tells all else that ranks must have in common."""

    def readers(self, register: str) -> frozenset[tuple[int, ...]]:
        """The ranks of the queues that read a register."""

    def rewired(self, low: Lowered) -> Lowered:
        """The registers of tasks, where some read a register in the place of another."""

    def link_of(self, edge: RegisterEnd, line: Carrier, rank: int) -> Link | None:
        """The link of a register to other ranks, if it was added, or read where its tasks are not."""

    def work_of(
        self, pipeline: "ProvedPipeline", links: Mapping[str, Link], actor: Actor, task: Callable[[], Fire]
    ) -> Fire:
        """The work of an actor: one that was added, or a task of the step, to which registers may bring arguments."""


class ProvedPipeline:
    """A step of micro-batches, proved to end. `variants` are graphs by route and kind of a micro-batch, all of the same
    chunks.

    Micro-batches take the routes by turns. The second has copies of the weights on other ranks. What weights they see,
    and where gradients go, is said by `weights`.
    """

    def __init__(
        self,
        variants: Mapping[VariantKey, Variant],
        kinds: Sequence[PieceKind],
        schedule: Schedule,
        name: str,
        weights: Weights,
        slices: int = 1,
        *,
        late: bool = False,
    ) -> None:
        self.variants, self.kinds, self.schedule, self.slices = variants, kinds, schedule, slices
        self.name, self.weights = name, weights
        self.firsts = [variants[route, kinds[0]] for route in sorted({route for route, _ in variants})]
        self.keys = [(k % len(self.firsts), kind) for k, kind in enumerate(kinds)]  # of the micro-batches
        self.where, self.count = self.firsts[0].where, len(self.firsts[0].where.group)
        self.lowered = lowered(self.tasks, schedule, len(kinds) // slices, name, slices, weights.ends(), late=late)
        self.network: Network = self.lowered[kinds[0]].network
        self.proof: Simulation = proved(self.network)
        self.opening: OpenNetwork | None = None
        self.draws = any(isinstance(stage, Draw) for stage in self.firsts[0].stages)
        ranks = sorted({rank for each in self.places.values() for rank in each})
        self.everywhere = Placement(self.where.placements[0][0].type, tuple(ranks), (len(ranks),), None)

    @property
    def tasks(self) -> dict[PieceKind, list[tuple[Tasks, Chunks]]]:
        """The tasks of micro-batches by kind and route."""
        return {
            kind: [(v.tasks, v.where) for route in range(len(self.firsts)) for v in (self.variants[route, kind],)]
            for kind in dict.fromkeys(self.kinds)
        }

    @cached_property
    def ordered(self) -> bool:
        """Whether ranks keep to the order of the proof."""
        if self.schedule.unpinned:
            return True
        return max(map(len, self.places.values()), default=0) > 1 or settled(self.proof)

    @cached_property
    def taking(self) -> Counter[int]:
        """How many micro-batches take each route."""
        return Counter(route for route, _ in self.keys)

    @cached_property
    def answers(self) -> Answers:
        return Answers(self.proof)

    @property
    def places(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each queue."""
        mine = {f"device {group}": self.where.ranks(group) for group in sorted(set(self.where.group))}
        mine.update(links_of(mine, self.network))
        return {**mine, **self.opening.places} if self.opening else mine

    @property
    def again(self) -> tuple[str, ...]:
        """The values that are moved a second time for the backward, once for each time."""
        return moved_again(do for task in self.firsts[0].tasks.tasks.values() for do in task.todo)

    def open(self, made: OpenNetwork) -> None:
        """Have more actors take part, before anything was made to run."""
        self.lowered = {kind: made.rewired(low) for kind, low in self.lowered.items()}
        self.opening, self.network, self.proof = made, made.network, made.proof
        for known in ("ordered", "answers"):
            vars(self).pop(known, None)  # they are of the network as it was
