"""A step and its memory, from what one layer of each stage takes: its schedule is simulated, and nothing is planned.

An estimate only sets the order in which choices are planned in full.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from ....actors.schedules.definition import Shape
from ....actors.schedules.pipeline import Costs
from ....actors.schedules.preview import preview
from ....actors.schedules.published import published
from ....boxing.figures import duration, volume
from ....placement import default_cluster, placement
from ....placement.links import Links
from .degrees import Degrees, Pipeline
from .stage_figures import LayerFigures, StageFigures

__all__ = ["PlanEstimate", "estimate", "layers_of_stages", "links_over_data"]

ROUNDS = 3  # micro-batches a device that are simulated; those behind take as long as the slowest device


@dataclass(frozen=True)
class PlanEstimate:
    """Seconds of a step, and bytes of the fullest rank, which are `sure` where a plan in full of its like told them."""

    seconds: float
    memory: float
    sure: bool = False

    def __str__(self) -> str:
        return f"about {duration(self.seconds)}, {volume(int(self.memory))}"


def estimate(of: StageFigures, count: int, at: Degrees, links: Links, gaps: float = 0.0) -> PlanEstimate:
    """The estimate of a choice for so many layers; `links` are those between ranks with the same weights. What comes
    and goes has `gaps` of such a share of it."""
    chunks = at.pipe * at.by.chunks
    each = layers_of_stages(of, count, chunks)
    behind = accumulate(each, initial=0)
    ends = [(k == 0, k == chunks - 1) for k in range(chunks)]
    stages = [
        of.stage(n, first=first, last=last, before=before)
        for n, (first, last), before in zip(each, ends, behind, strict=False)
    ]
    if at.pipe == 1:
        seconds, kept = at.micro_batches * stages[0].seconds, [float(stages[0].kept)]
        devices = [0]
    else:
        seconds, kept = _piped(at.by, at.pipe, at.micro_batches, stages)
        schedule = published(at.by.schedule)
        devices = [schedule.device(Shape(at.pipe, at.micro_batches, at.by.chunks), k) for k in range(chunks)]
    whole = _of_devices(stages, devices, at.pipe)
    moved = [_shared(one, at.alike, links) for one in whole]
    once = max(m.once(seconds if at.pipe == at.micro_batches == 1 else 0.0) for m in moved)
    if at.spread:
        hidden = max(seconds, at.micro_batches * max(m.gathered for m in moved))
        seconds = hidden + 3 * at.micro_batches * max(m.begins for m in moved)
    passing = (max(live + one.passing, one.moment) for one, live in zip(whole, kept, strict=True))
    memory = [_rests(one, at) + one.stays + (1 + gaps) * more for one, more in zip(whole, passing, strict=True)]
    return PlanEstimate(seconds + once, max(memory))


def layers_of_stages(of: StageFigures, count: int, chunks: int) -> list[int]:
    """How many layers each chunk has so that the slowest is as quick as can be: ends have more to do than layers."""
    if chunks == 1:
        return [count]
    layer = of.middle.seconds or 1.0
    more = [0.0] * chunks
    more[0], more[-1] = of.first.seconds - layer, of.last.seconds - layer
    each = [1] * chunks
    for _ in range(count - chunks):
        least = min(range(chunks), key=lambda k: (each[k] * layer + more[k], -k))
        each[least] += 1
    return each


@dataclass(frozen=True)
class _DataMoves:
    """Seconds of an update, of bringing the bytes of gradients home and of weights back, and of beginning to do so for
    each weight, which all wait for."""

    update: float
    home: float = 0.0
    back: float = 0.0
    begins: float = 0.0

    def once(self, beside: float) -> float:
        """Those once a step, where so long is computed beside them."""
        return self.update + max(0.0, self.home + self.back - beside) + self.begins

    @property
    def gathered(self) -> float:
        """Those of a micro-batch that bring bytes, where weights are in pieces: for the forward and the backward."""
        return self.home + 2 * self.back


def _shared(of: LayerFigures, data: int, links: Links) -> _DataMoves:
    if data == 1:
        return _DataMoves(of.update)
    share = (data - 1) / data
    home = links.seconds("reduce_scatter", (0,), of.gradients * share)
    back = links.seconds("all_gather", (0,), of.parameters * share)
    begins = of.tensors * links.seconds("all_gather", (0,), 0.0)
    return _DataMoves(of.update / data, home, back, begins)


def _rests(of: LayerFigures, at: Degrees) -> float:
    """Bytes that lie on a rank all the time."""
    cut = at.alike if at.spread else 1
    return (of.parameters + of.gradients) / cut + of.states / at.alike


def _of_devices(stages: Sequence[LayerFigures], devices: Sequence[int], many: int) -> list[LayerFigures]:
    """The figures of each device: those of all its chunks."""
    found: list[LayerFigures | None] = [None] * many
    for device, stage in zip(devices, stages, strict=True):
        before = found[device]
        found[device] = stage if before is None else before + stage
    return [one for one in found if one is not None]


def _piped(by: Pipeline, p: int, m: int, stages: Sequence[LayerFigures]) -> tuple[float, list[float]]:
    """Seconds of all micro-batches, and bytes that each device keeps at most, by the simulated schedule."""
    few = m if m <= ROUNDS * p else ROUNDS * p + m % p  # interleaved ones go in groups of p
    end, slowest, kept = _simulated(by, p, few, tuple(stage.costs for stage in stages))
    return end + (m - few) * slowest / few, list(kept)


@lru_cache(maxsize=1 << 10)
def _simulated(by: Pipeline, p: int, m: int, costs: tuple[Costs, ...]) -> tuple[float, float, tuple[float, ...]]:
    found = preview(published(by.schedule), Shape(p, m, by.chunks), costs)
    busy = max((found.run.busy(f"device {k}") for k in range(p)), default=0.0)
    return found.end, busy, tuple(map(float, found.memory))


def links_over_data(kind: str) -> Callable[[Degrees], Links]:
    """The links of ranks with the same weights, for any choice: those of one such group, since all are alike."""

    @lru_cache(maxsize=1 << 8)
    def known(data: int, tensor: int) -> Links:
        group = placement(kind, range(0, data * tensor, tensor))
        return Links.of(group, default_cluster(group))

    return lambda at: known(at.alike, at.tensor)
