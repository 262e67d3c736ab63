"""Weights that nobody holds a version of: what may be done with them, and how a backward corrects them.

velocity   the mean of late updates of a weight
back       weight - gap * velocity: about what it was before the last `gap` updates, as its forward saw it
"""

from collections.abc import Mapping

from .....placement.errors import ScheduleError
from ...compiler.generated_calls import Shards
from ...lower.segments import Segment, made_by
from ..variant import Variant

__all__ = ["Velocity", "check_only_read"]

LEFT = 0.135  # what is left of an update in the velocity when as many have followed as a chunk is late: PipeMare's D


class Velocity:
    """The mean of the last updates of a chunk's weights, which are read `late` updates late: of memory that each step
    is given, and goes on with."""

    def __init__(self, late: int) -> None:
        self.decay = LEFT ** (1 / late)
        self.mean: Mapping[str, Shards] = {}

    def before(self, weights: Mapping[str, Shards]) -> None:
        """An update is about to change these."""
        for name, shards in weights.items():
            for mean, x in zip(self.mean[name], shards, strict=True):
                mean.mul_(self.decay).sub_(x, alpha=1 - self.decay)

    def after(self, weights: Mapping[str, Shards]) -> None:
        """An update has changed these."""
        for name, shards in weights.items():
            for mean, x in zip(self.mean[name], shards, strict=True):
                mean.add_(x, alpha=1 - self.decay)

    def back(self, weights: Mapping[str, Shards], gap: int) -> dict[str, Shards]:
        """The weights as they were about so many updates ago."""
        if not gap:
            return dict(weights)
        return {
            name: tuple([(x - v * gap).to(x.dtype) for x, v in zip(shards, self.mean[name], strict=True)])
            for name, shards in weights.items()
        }


def check_only_read(variant: Variant, schedule: str, name: str) -> None:
    """Refuse what is computed of weights alone: a backward would have that of its forward, which is another version."""
    found = set(variant.where.weights)
    for stage in variant.stages:
        for op in stage.ops if isinstance(stage, Segment) else ():
            seen = [x for x in op.inputs if x in found]
            if not seen or len(seen) < len(op.inputs) or not any(variant.graph.values[x].grad for x in seen):
                continue
            if not op.op.is_view or variant.graph.layout(seen[0]).dtype is not op.outputs[0].layout.dtype:
                raise ScheduleError(
                    f"{name}: {op.op} at {op.origin.line or 'no line'} makes something of {seen[0]} alone\n"
                    f"  {schedule} has one version of the weights, and its backward would have this of another; "
                    "keep weights as they are used, as flow.nn.cast does, or take 'pipedream'"
                )
            found.update(y.name for y in op.outputs)
        if not isinstance(stage, Segment) and stage.inputs and found.issuperset(stage.inputs):
            found.update(made_by(stage))
