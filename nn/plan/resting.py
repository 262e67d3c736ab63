"""Resting bytes: what a training has between steps on all ranks together, each number once."""

from dataclasses import dataclass
from math import ceil

from ..graph.step import Step

__all__ = ["RestingBytes"]


@dataclass(frozen=True)
class RestingBytes:
    """Bytes of weights, gradients, states of the optimizer, and buffers; the master of a weight in another dtype is
    among the states."""

    weights: int
    gradients: int
    states: int
    buffers: int = 0

    @classmethod
    def of(cls, step: Step) -> "RestingBytes":
        """Those of a step, whatever its plan cuts."""
        learns, kept = step.plan.passes.learns, step.plan.passes.states
        weights = gradients = states = buffers = 0
        for source in step.graph.sources:
            lies, home, master = source.value.layout, source.home, source.master
            buffers += lies.nbytes if source.kind == "buffer" else 0
            if source.kind == "parameter":
                weights += lies.nbytes
                if source.value.grad and learns:
                    gradients += home.nbytes
                    states += master.nbytes * (kept + (master.dtype is not lies.dtype))
        return cls(weights, gradients, states, buffers)

    @property
    def whole(self) -> int:
        """Those of weights, gradients and states."""
        return self.weights + self.gradients + self.states

    @property
    def saved(self) -> int:
        """Those of a checkpoint."""
        return self.weights + self.states + self.buffers

    def ranks(self, limit: float, *, host: bool) -> int:
        """Ranks below which weights and gradients alone take more than so many bytes of one, however they are cut, and
        states too, unless the host has them."""
        return max(1, ceil((self.whole - self.states * host) / limit))
