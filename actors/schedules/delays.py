"""Delays: how many updates lie between the weights that a micro-batch reads and those that its gradient changes.

    F of k reads w(a)    B of k reads w(b)    the gradient of k goes into the update of w(u)
    forward  u - a       backward  u - b      where an update has every micro-batch, u is k

They are counted on the simulated network where weights are read as they are, and known where a version is held.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...placement.errors import ScheduleError
from ..protocol.feasibility import proved
from ..protocol.simulate import Simulation
from .definition import Definition, Shape
from .pipeline import network_of, version

__all__ = ["Delays", "delays", "delays_of"]


@dataclass(frozen=True)
class Delays:
    """By chunk, how many micro-batches have read weights that were so many updates late, forward and backward. Where a
    compiled step tells, `parameters` has by name the delay of each in the long run."""

    forward: Mapping[int, Mapping[int, int]]
    backward: Mapping[int, Mapping[int, int]]
    parameters: Mapping[str, int] = field(default_factory=dict)

    @property
    def chunks(self) -> dict[int, int]:
        """The delay of each chunk in the long run: when the line is full, and before, weights are less late."""
        return {chunk: max(found, default=0) for chunk, found in self.forward.items()}

    def __str__(self) -> str:
        return "\n".join(
            f"chunk {chunk}: forward {_told(of)}; backward {_told(self.backward[chunk])}"
            for chunk, of in self.forward.items()
        )


def delays(schedule: Definition, shape: Shape) -> Delays:
    """The delays of a step; a schedule with a flush has none, and an error."""
    if schedule.synchronous:
        raise ScheduleError(
            f"{schedule.name} updates weights behind all micro-batches, so that none of them reads any late\n"
            "  delays are of schedules without a flush, such as 'pipedream', '2bw' and 'pipemare'"
        )
    return delays_of(schedule, shape, proved(network_of(schedule, shape)))


def delays_of(schedule: Definition, shape: Shape, run: Simulation) -> Delays:
    """The same of a network that was simulated."""
    found: dict[str, dict[int, Counter[int]]] = {kind: defaultdict(Counter) for kind in "FB"}
    for kind, chunk, number, seen in _read(schedule, shape, run):
        found[kind][chunk][number // schedule.value(schedule.update, shape, chunk) - seen] += 1
    forward, backward = (
        {chunk: dict(sorted(of.items())) for chunk, of in sorted(found[kind].items())} for kind in "FB"
    )
    return Delays(forward, backward)


def _read(schedule: Definition, shape: Shape, run: Simulation) -> Iterator[tuple[str, int, int, int]]:
    """Each forward and backward with its chunk and micro-batch, and after how many updates were what it read."""
    updates: Counter[int] = Counter()  # of each chunk, which are in the order of its queue with all else there
    for ran in run.firings:
        for name, label in ran.parts:
            kind, chunk = name[0], int(name[1:])
            if kind == "U":
                updates[chunk] += 1
            elif kind in "FB":
                held = updates[chunk] if schedule.unpinned else version(schedule, shape, chunk, label)
                yield kind, chunk, label, held


def _told(of: Mapping[int, int]) -> str:
    """The counts of delays in words, such as `1 x 0, 7 x 1`."""
    return ", ".join(f"{many} x {late}" for late, many in of.items())
