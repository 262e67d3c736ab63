"""A network that actors were added to, as the program of a step asks it: who added them gives it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ....actors.protocol.network import Actor, Network
from ....actors.protocol.simulate import Simulation
from ....actors.runtime.channel import Carrier, Link
from ....actors.runtime.partition import RegisterEnd
from ..microbatch.batch import PieceKind
from .network import Lowered
from .weights.step_state import StepState
from .weights.weights import Fire

__all__ = ["OpenNetwork", "OpenProgram"]


class OpenProgram(Protocol):
    """A program of micro-batches as the work of added actors sees it."""

    opening: "OpenNetwork | None"
    step: StepState  # that is under way

    @property
    def kinds(self) -> Sequence[PieceKind]: ...
    @property
    def firsts(self) -> Sequence[object]:
        """One for each route."""

    @property
    def count(self) -> int:
        """The number of chunks of a route."""

    @property
    def lowered(self) -> Mapping[PieceKind, Lowered]: ...
    @property
    def links(self) -> Mapping[str, Link]: ...


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

    def work_of(self, program: OpenProgram, actor: Actor, task: Callable[[], Fire]) -> Fire:
        """The work of an actor: one that was added, or a task of the step, to which registers may bring arguments."""
