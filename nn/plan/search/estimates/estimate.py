"""A step and its memory, from what one layer of each stage takes: its schedule is simulated, and nothing is planned.

An estimate only sets the order in which choices are planned in full.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from .....actors.schedules.definition import Shape
from .....actors.schedules.pipeline import Costs
from .....actors.schedules.preview import Preview, preview
from .....actors.schedules.published import published
from .....boxing.figures import duration, volume
from .....placement import default_cluster, placement
from .....placement.links import Links
from .degrees import Degrees, Pipeline
from .shorter_model import ShortModels
from .stage_figures import LayerFigures, StageFigures

__all__ = [
    "Estimates",
    "PlanEstimate",
    "PlanTold",
    "estimate",
    "layers_of_stages",
    "links_over_data",
]

SLACK, SLACK_IN_STAGES = 1.05, 1.01  # by which an estimate of memory may be too high, of one stage and of several
ROUNDS = 3  # micro-batches a device that are simulated; those behind take as long as the slowest device


@dataclass(frozen=True)
class PlanEstimate:
    """Seconds of a step, and bytes of the fullest rank, which may be `slack` times what a plan in full takes."""

    seconds: float
    memory: float
    slack: float = 1.0

    def __str__(self) -> str:
        return f"about {duration(self.seconds)}, {volume(int(self.memory))}"


class PlanTold(NamedTuple):
    """By how much a plan in full was slower and heavier than was estimated. Where it took too much, that is `sure`: its
    kin have no slack any more."""

    slower: float = 1.0
    heavier: float = 1.0
    sure: bool = False

    def of(self, known: PlanEstimate) -> PlanEstimate:
        return PlanEstimate(known.seconds * self.slower, known.memory * self.heavier, 1.0 if self.sure else known.slack)


class Estimates:
    """The estimates of a model's choices, by figures of its layers and by what plans in full told of their kin: of such
    with experts shared or not, and in stages or not."""

    def __init__(self, short: ShortModels, gaps: float) -> None:
        self.short, self.gaps = short, gaps
        self.links = links_over_data(short.space.kind)
        self.told: defaultdict[tuple[bool, bool], PlanTold] = defaultdict(PlanTold)

    @staticmethod
    def kin(at: Degrees) -> tuple[bool, bool]:
        return at.expert > 1, at.pipe > 1

    def tell(self, at: Degrees, more: PlanTold) -> None:
        """Correct all of a choice's kin once more."""
        known = self.told[self.kin(at)]
        both = known.slower * more.slower, known.heavier * more.heavier, known.sure or more.sure
        self.told[self.kin(at)] = PlanTold(*both)

    def of(self, at: Degrees) -> PlanEstimate | None:
        """The estimate of a choice, or none where nothing is known of its layers."""
        figures = self.short.of(at)
        if figures is None:
            return None
        known = estimate(figures, self.short.space.count, at, self.links(at), self.gaps)
        return self.told[self.kin(at)].of(known)

    def memory(self, at: Degrees) -> float:
        """That of the estimate alone, for which nothing is simulated."""
        stages = self._stages(at)
        known = _memory(at, stages, _of_devices(stages, at), self.gaps)
        return known * self.told[self.kin(at)].heavier

    def resting(self, at: Degrees) -> float:
        """Bytes of the fullest device that are there for a whole step, whatever runs again."""
        return max(_rests(one, at) + one.stays for one in _of_devices(self._stages(at), at))

    def _stages(self, at: Degrees) -> list[LayerFigures]:
        figures = self.short.of(at)
        assert figures is not None, "a choice of its kind was estimated"
        return _stages(figures, self.short.space.count, at)


def estimate(of: StageFigures, count: int, at: Degrees, links: Links, gaps: float = 0.0) -> PlanEstimate:
    """The estimate of a choice for so many layers; `links` are those between ranks with the same weights. What comes
    and goes has `gaps` of such a share of it."""
    stages = _stages(of, count, at)
    whole = _of_devices(stages, at)
    seconds = _seconds(at, stages)
    moved = [_shared(one, at, links) for one in whole]
    once = max(m.once(seconds if at.pipe == at.micro_batches == 1 else 0.0) for m in moved)
    if at.spread:
        hidden = max(seconds, at.micro_batches * max(m.gathered for m in moved))
        seconds = hidden + 3 * at.micro_batches * max(m.begins for m in moved)
    return PlanEstimate(seconds + once, _memory(at, stages, whole, gaps), SLACK if at.pipe == 1 else SLACK_IN_STAGES)


def _stages(of: StageFigures, count: int, at: Degrees) -> list[LayerFigures]:
    """The figures of each chunk of a choice."""
    chunks = at.pipe * at.by.chunks
    each = layers_of_stages(of, count, chunks)
    behind = accumulate(each, initial=0)
    ends = [(k == 0, k == chunks - 1) for k in range(chunks)]
    return [
        of.stage(n, first=first, last=last, before=before)
        for n, (first, last), before in zip(each, ends, behind, strict=False)
    ]


def _memory(at: Degrees, stages: Sequence[LayerFigures], whole: Sequence[LayerFigures], gaps: float) -> float:
    """Bytes of the fullest device."""
    passing = (max(live + one.passing, one.moment) for one, live in zip(whole, _kept(at, stages), strict=True))
    return max(_rests(one, at) + one.stays + (1 + gaps) * more for one, more in zip(whole, passing, strict=True))


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


def _shared(of: LayerFigures, at: Degrees, links: Links) -> _DataMoves:
    """Moves between the ranks with the same weights: those of experts, nearly all, where experts are shared."""
    alike = at.alike // at.expert
    if alike == 1:
        return _DataMoves(of.update / at.alike)
    share = (alike - 1) / alike
    home = links.seconds("reduce_scatter", (0,), of.gradients * share)
    back = links.seconds("all_gather", (0,), of.parameters * share)
    begins = of.tensors * links.seconds("all_gather", (0,), 0.0)
    return _DataMoves(of.update / at.alike, home, back, begins)


def _rests(of: LayerFigures, at: Degrees) -> float:
    """Bytes that lie on a rank all the time."""
    cut = at.alike if at.spread else 1
    return (of.parameters + of.gradients) / cut + of.states / at.alike


def _of_devices(stages: Sequence[LayerFigures], at: Degrees) -> list[LayerFigures]:
    """The figures of each device: those of all its chunks."""
    schedule, shape = published(at.by.schedule), Shape(at.pipe, at.micro_batches, at.by.chunks)
    found: list[LayerFigures | None] = [None] * at.pipe
    for chunk, stage in enumerate(stages):
        device = schedule.device(shape, chunk)
        before = found[device]
        found[device] = stage if before is None else before + stage
    return [one for one in found if one is not None]


def _few(at: Degrees) -> int:
    """The micro-batches that are simulated."""
    p, m = at.pipe, at.micro_batches
    return m if m <= ROUNDS * p else ROUNDS * p + m % p  # interleaved ones go in groups of p


def _seconds(at: Degrees, stages: Sequence[LayerFigures]) -> float:
    """Seconds of all micro-batches, by the simulated schedule."""
    if at.pipe == 1:
        return at.micro_batches * stages[0].seconds
    few = _few(at)
    end, slowest = _simulated(at.by, at.pipe, few, tuple(stage.costs for stage in stages))
    return end + (at.micro_batches - few) * slowest / few


@lru_cache(maxsize=1 << 10)
def _simulated(by: Pipeline, p: int, m: int, costs: tuple[Costs, ...]) -> tuple[float, float]:
    found = preview(published(by.schedule), Shape(p, m, by.chunks), costs)
    return found.end, max((found.run.busy(f"device {k}") for k in range(p)), default=0.0)


def _kept(at: Degrees, stages: Sequence[LayerFigures]) -> list[float]:
    """Bytes that each device keeps at most: how long tasks take changes nothing about their order on a device."""
    if at.pipe == 1:
        return [float(stages[0].kept)]
    return [float(n) for n in replace(_in_order(at.by, at.pipe, _few(at)), costs=tuple(s.costs for s in stages)).memory]


@lru_cache(maxsize=1 << 5)
def _in_order(by: Pipeline, p: int, m: int) -> Preview:
    return preview(published(by.schedule), Shape(p, m, by.chunks))


def links_over_data(kind: str) -> Callable[[Degrees], Links]:
    """The links of ranks with the same weights, for any choice: those of one such group, since all are alike."""

    @lru_cache(maxsize=1 << 8)
    def known(ranks: int, each: int) -> Links:
        group = placement(kind, range(0, ranks, each))
        return Links.of(group, default_cluster(group))

    return lambda at: known(at.alike * at.tensor, at.expert * at.tensor)
