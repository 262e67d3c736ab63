"""Open graphs: actors are added to their steps."""

from functools import partial
from typing import Self

from ...actors.added.addition import Added
from ..graph.graph import StepGraph
from .additions import Addition, add_again, add_to

__all__ = ["OpenGraph"]


class OpenGraph(StepGraph):
    """A graph whose steps in micro-batches take more actors."""

    def add(self, addition: Addition) -> Self:
        """Have more actors take part in the step that was planned last, which has not run; returns the graph.

        `addition` is a `flow.actors.Added` of `step.network`, or a function that makes one of a network: that is
        called for every step that is planned from now on. What is no function is of the network of this one: a step
        with another, as after `move`, refuses it.
        """
        if self._last is None and isinstance(addition, Added):
            _ = self.planned  # refuses
        network = None
        if self._last is not None:
            network = self._last.open_network if isinstance(addition, Added) else None
            self._last.add(partial(add_to, addition))
        self._additions.append(partial(add_again, addition, network))
        return self
