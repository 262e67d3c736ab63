"""Measures of a planned graph: the memory of a rank, and the course of its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..figures import duration

__all__ = ["Course", "Held"]

STAGES = 4  # that are named, those that work most


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds, by kind.

    `total` is the most at any time, perhaps less than the sum of all kinds, because activations come and go. `moment`
    names the values that are computed then. Of activations so many are `lasting`: sums of gradients and what is made
    once, from the first micro-batch on. Offloaded values are no part of that: they are `host` bytes of the host's
    memory, and `disk` bytes of files."""

    parameters: int
    gradients: int
    states: int
    activations: int
    total: int
    moment: Sequence[str] = ()
    host: int = 0
    disk: int = 0
    lasting: int = 0

    @property
    def passing(self) -> int:
        """The part of the total that comes and goes, beside what is there all the time or from its first use on."""
        return max(0, self.total - self.parameters - self.gradients - self.states - self.lasting)

    @property
    def shares(self) -> dict[str, float]:
        """The part of each kind in the total, scaled because they are not all held at once."""
        sizes = {kind: getattr(self, kind) for kind in ("parameters", "gradients", "states", "activations")}
        return {kind: size * self.total / (sum(sizes.values()) or 1) for kind, size in sizes.items()}


@dataclass(frozen=True)
class Course:
    """The course of micro-batches through a pipeline: a step's seconds, its bubble, and the place and working seconds
    of each stage. The bubble is the share of the step in which stages stand still. Behind all of it come the seconds of
    what is done `once`, in the stage that takes longest for it. Where a schedule has no flush, `draining` are the
    seconds in which a call fills and drains the line, which is empty between two of them."""

    schedule: str
    micro_batches: int
    seconds: float
    bubble: float
    stages: tuple[tuple[str, float], ...]
    once: float = 0.0
    draining: float = 0.0

    def __str__(self) -> str:
        slowest = sorted(self.stages, key=lambda stage: -stage[1])[:STAGES]
        kept = [stage for stage in self.stages if stage in slowest]
        more = len(self.stages) - len(kept)
        said = ", ".join(f"{where} {duration(busy)}" for where, busy in kept) + f", {more} more less" * bool(more)
        under = f" under {self.schedule}" * bool(self.schedule)
        last = f"; once a step {duration(self.once)}" if len(self.stages) > 1 and self.once else ""
        last += f"; each call fills and drains the line in {duration(self.draining)}" * bool(self.draining)
        return f"{self.micro_batches} micro-batches{under}, bubble {self.bubble:.1%}; stages work: {said}{last}"
