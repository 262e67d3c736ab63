"""The weights of a step as a program asks for them. What a kind of weights does not say for itself is answered here."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .....actors.protocol.network import Actor, Network
from .....actors.protocol.state import Firing
from ...compiler.generated_calls import Shards
from ...memory.resident import Resident
from ...tasks.task import Name
from ..network import Bundle, Ends
from .step_state import NO_STEP, StepState, VariantKey

__all__ = ["Fire", "MeanDtype", "Weights"]

Fire: TypeAlias = Callable[[Firing], Sequence[Any]]  # the work of an actor
MeanDtype: TypeAlias = Callable[[torch.dtype], torch.dtype]  # of the mean of updates of a weight of some dtype


class Weights(ABC):
    """The weights that micro-batches see, and where gradients of them go. Threads hold the work that is made here, and
    so these weights: they know nothing of the program that has them."""

    step: StepState = NO_STEP  # that is under way
    steps = False  # whether optimizers step chunk by chunk
    alone: Mapping[str, int] = {}  # the chunk of a weight whose gradients that brings home by itself
    late: Mapping[int, Collection[str]] = {}  # by chunk the weights that change while micro-batches go on
    corrected: Collection[str] = ()  # the weights that have a mean of late updates

    def ends(self, updates: Mapping[str, float] | None = None) -> Ends | None:
        """The ends of chunks in the network: with their seconds, if it is known what a step takes of each weight."""
        return None

    @property
    def validates(self) -> Sequence[str] | None:
        """The weights of which steps chunk by chunk are made good when the gradients of all are known; None: there are
        no such steps."""
        return None

    def told(self, register: str, network: Network, places: Mapping[str, Sequence[int]]) -> Bundle | None:
        """The content of a register by which chunks tell each other of gradients."""
        return None

    def corrects(self, delays: Mapping[int, int]) -> None:
        """Have chunks that read weights so many updates late corrected."""
        raise AssertionError(f"{type(self).__name__} corrects no weights")

    def resident(self, slots: Mapping[str, int], states: int, mean: MeanDtype) -> Iterator[Resident]:
        """The memory of these weights beside themselves: of each register there are so many `slots` at most, of each
        weight so many `states`, and a mean has the dtype that `mean` says."""
        yield from ()

    @abstractmethod
    def prepare(self) -> None:
        """Compile what is done once a step, which else the first does."""

    def initial(self, network: Network) -> dict[str, Callable[[], Sequence[Any]]]:
        """The values that lie in registers from the start."""
        return {}

    def work(self, actor: Actor, task: Callable[[Actor], Fire]) -> Fire:
        """The work of an actor: a task, or what is done to weights."""
        return task(actor)

    def goes_on(self, means: Mapping[str, Shards]) -> None:
        """Have the next step go on with these means of corrected weights."""
        raise AssertionError(f"{type(self).__name__} corrects no weights")

    @abstractmethod
    def begin(self, step: StepState) -> dict[VariantKey, Mapping[str, Shards]]:
        """The weights that a step starts with, for each route and kind of micro-batches."""

    def seen(self, shards: Mapping[str, Shards], firing: Firing, key: VariantKey, task: Name) -> Mapping[str, Shards]:
        """The sources of a micro-batch as a task is to see them."""
        return shards

    @abstractmethod
    def grads(self) -> dict[str, Shards]:
        """The gradients of the step, at home; none that optimizers have had."""

    def undo(self) -> Sequence[int]:
        """Take back what optimizers did in a step that an error has ended; the chunks that stay changed."""
        return ()

    def end(self) -> None:
        """Let go what a step held."""
        self.step = NO_STEP
