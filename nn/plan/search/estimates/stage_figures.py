"""Figures of stages: what a first, a middle and a last layer take of a micro-batch, in seconds and bytes.

They are those of a plan of a model of three layers, each a stage of its own: what is before the layers is in the first,
and what is behind them in the last. Where layers are in several lists, models with two and with three of each list tell
what one more of each takes. Signatures are those that the chooser finds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from .....actors.schedules.pipeline import Costs
from ....graph.run.costs import step_costs
from ....graph.run.task_memory import memory_of_tasks
from ....graph.step import Step

__all__ = ["FEWER", "LAYERS", "LayerFigures", "StageFigures"]

LAYERS, FEWER = 3, 2
ALIKE = ("passing", "moment", "hop")  # of several layers as of that with most
TINY = 1e-9  # of a layer, by which a share of several may be rounded
PARTS = ("forward", "backward", "weight", "exchange")


@dataclass(frozen=True)
class LayerFigures:
    """Seconds of a micro-batch by part, of the hop to the next, of an update; bytes of weights, gradients and states,
    of what `stays` for a step, kept of each micro-batch, `passing` while a task runs, and of the `moment` when
    optimizers step; and how many weights these are.
    """

    forward: float
    backward: float
    weight: float
    exchange: float
    hop: float
    update: float
    parameters: int
    gradients: int
    states: int
    stays: int  # weights that are gathered once, and sums of gradients beyond what comes home
    kept: int
    passing: int
    moment: int
    tensors: int  # weights, each of which is gathered by itself

    def __add__(self, other: "LayerFigures") -> "LayerFigures":
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return LayerFigures(**{**both, **{name: max(getattr(self, name), getattr(other, name)) for name in ALIKE}})

    def __sub__(self, other: "LayerFigures") -> "LayerFigures":
        """Those of the layers that another has not."""
        less = self + other.times(-1)
        return LayerFigures(
            **{
                **{f.name: max(0, getattr(less, f.name)) for f in fields(self)},
                "passing": self.passing,
                "moment": self.moment,
            }
        )

    def times(self, n: int) -> "LayerFigures":
        """Those of so many layers."""
        return LayerFigures(**{f.name: getattr(self, f.name) * (1 if f.name in ALIKE else n) for f in fields(self)})

    def mixed(self, other: "LayerFigures", many: int, layers: int) -> "LayerFigures":
        """Those of a stage of so many layers, of which some are as in another."""
        here = {f.name: getattr(self, f.name) for f in fields(self)}
        more = {name: (getattr(other, name) - x) * many for name, x in here.items()}
        both = {
            name: x + (more[name] // layers if isinstance(x, int) else more[name] / layers) for name, x in here.items()
        }
        return LayerFigures(**{**both, **{name: max(here[name], getattr(other, name)) for name in ALIKE if many}})

    def gathered(self, over: int) -> "LayerFigures":
        """The same where so many ranks do not share states and the update between them."""
        return replace(self, states=over * self.states, update=over * self.update)

    @property
    def seconds(self) -> float:
        """Forward and backward of a micro-batch."""
        return self.forward + self.backward + self.weight + 2 * self.exchange

    @property
    def held(self) -> int:
        """Bytes, with those of one micro-batch."""
        return self.parameters + self.gradients + self.states + self.stays + self.kept + self.passing

    @property
    def costs(self) -> Costs:
        return Costs(self.forward, self.backward, self.weight, self.hop, self.kept, exchange=self.exchange)


class StageFigures(NamedTuple):
    """Those of a layer with all that is before it, of one between, and of one with all behind it. Of all layers a
    `share` may be of another kind, of which stages take as `other` says."""

    first: LayerFigures
    middle: LayerFigures
    last: LayerFigures
    other: "StageFigures | None" = None
    share: float = 0.0

    @classmethod
    def of(cls, step: Step) -> "StageFigures":
        """Those of a step of three layers, each a stage."""
        first, middle, last = _chunks(step)
        return cls(first, middle, last)

    @classmethod
    def between(cls, fewer: Step, more: Step) -> "StageFigures":
        """Those of steps without stages, of models with two and with three layers of each list."""
        (two,), (three,) = _chunks(fewer), _chunks(more)
        return cls(two, three - two, two.times(0))

    def gathered(self, over: int) -> "StageFigures":
        """The same where so many ranks do not share states and the update between them."""
        first, middle, last = (one.gathered(over) for one in (self.first, self.middle, self.last))
        return StageFigures(first, middle, last)

    def mixed(self, other: "StageFigures", share: float) -> "StageFigures":
        """Those where a share of the layers is as others are."""
        return self._replace(other=other, share=share) if share else self

    def stage(self, layers: int, *, first: bool, last: bool, before: int = 0) -> LayerFigures:
        """A stage of so many layers behind others. One with both ends has what is in neither once."""
        if self.other is not None:
            many = int(self.share * (before + layers) + TINY) - int(self.share * before + TINY)
            mine, theirs = (of.stage(layers, first=first, last=last) for of in (self._replace(other=None), self.other))
            both = mine.mixed(theirs, many, layers)
            if not (first and last and many):
                return both
            # In a backward those of the other kind come last: they are the first layers.
            freed = (layers - many) * self.middle.kept
            return replace(both, passing=max(mine.passing, self.other.middle.passing - freed))
        if first and last:
            return self.first + self.last + self.middle.times(layers - 2)
        if first or last:
            return (self.first if first else self.last) + self.middle.times(layers - 1)
        return self.middle.times(layers)


def _chunks(step: Step) -> list[LayerFigures]:
    """The figures of each chunk of a step, those of the rank with most."""
    pieces = step.plan.pieces
    assert pieces is not None
    one, held = pieces.first, step.held()
    with one.graph.priced():
        costs, updates = pieces.costs(), step_costs(one.graph, one.decided)
    made: dict[int, LayerFigures] = {}
    for ranks, memory in memory_of_tasks(one.variant, 0, regather=True):
        (chunk,) = memory.chunks
        mine, rest = memory.chunks[chunk], held[ranks[0]]
        update = sum(seconds for name, seconds in updates.items() if ranks[0] in one.graph.layout(name).placement)
        spent = {part: getattr(costs[chunk], part) for part in (*PARTS, "hop")}
        stays = rest.parameters + rest.gradients + rest.states
        bytes: Mapping[str, int] = {
            "parameters": rest.parameters,
            "gradients": rest.gradients,
            "states": rest.states,
            "stays": memory.once + max(0, mine.sums - rest.gradients),
            "kept": mine.kept[None],
            "tensors": sum(ranks[0] in one.graph.layout(name).placement for name in updates),
            "passing": max(mine.passing.values()),
            "moment": beside if (beside := rest.total - stays) > rest.activations else 0,
        }
        here = LayerFigures(**spent, update=update, **bytes)
        made[chunk] = max(here, made.get(chunk, here), key=lambda one: one.held)  # ranks may have unlike pieces
    return [made[chunk] for chunk in sorted(made)]
