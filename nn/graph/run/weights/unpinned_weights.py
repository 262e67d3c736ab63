"""Weights that nobody holds a version of: no register has them, as in PipeMare. There is one version, which a forward
reads at its time and its backward at its own. Where they are corrected, the backward reads them as many updates back as
there were since the forward, at the pace of the mean of late ones.

velocity   the mean of late updates of a weight
back       weight - gap * velocity: about what it was before the last `gap` updates, as its forward saw it
"""

from collections.abc import Iterator, Mapping, Sequence

from .....actors.protocol.state import Firing
from .....actors.schedules.schedule import Schedule
from .....placement.errors import ScheduleError
from ...compiler.generated_calls import Shards
from ...instructions.instruction import bytes_on
from ...lower.segments import Segment, made_by
from ...memory.resident import Resident
from ...microbatch.batch import PieceKind
from ...tasks.task import Name
from ..variant import Variant
from .step_state import VariantKey
from .weight_versions import Version, WeightVersions
from .weights import MeanDtype

__all__ = ["UnpinnedWeights"]

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


class UnpinnedWeights(WeightVersions):
    """How a schedule without a flush keeps weights of which nobody holds a version."""

    def __init__(
        self, variants: Mapping[VariantKey, Variant], kinds: Sequence[PieceKind], schedule: Schedule, name: str
    ) -> None:
        super().__init__(variants, kinds, schedule, name)
        check_only_read(self.variant, schedule.name, name)
        self.velocity: dict[int, Velocity] = {}  # where weights are corrected
        self.read: dict[tuple[int, int], int] = {}  # of updates, by chunk and micro-batch, those that its forward saw

    def corrects(self, delays: Mapping[int, int]) -> None:
        self.velocity = {chunk: Velocity(late) for chunk, late in delays.items() if late}
        self.corrected = frozenset(name for chunk in self.velocity for name in self.homes.get(chunk, ()))

    def resident(self, slots: Mapping[str, int], states: int, mean: MeanDtype) -> Iterator[Resident]:
        """A mean of each corrected weight, and those that the backward of one chunk sees."""
        yield from super().resident(slots, states, mean)
        chunks = [[self.variant.graph.layout(name) for name in self.homes.get(chunk, ())] for chunk in self.velocity]
        wide = [[of.with_dtype(mean(of.dtype)) for of in layouts] for layouts in chunks]
        yield Resident.of("states", [of for means in wide for of in means])

        def seen(rank: int) -> int:
            own = (sum(bytes_on(of, rank) for of in layouts) for layouts in chunks)
            largest = (max((bytes_on(of, rank) for of in means), default=0) for means in wide)
            return max((all_of + 2 * one for all_of, one in zip(own, largest, strict=True)), default=0)

        yield Resident("activations", seen)

    def goes_on(self, means: Mapping[str, Shards]) -> None:
        for chunk, velocity in self.velocity.items():
            velocity.mean = {name: means[name] for name in self.homes.get(chunk, ())}

    def updated(self, chunk: int, grads: Mapping[str, Shards]) -> tuple[Version]:
        velocity = self.velocity.get(chunk)
        if velocity is None:
            return super().updated(chunk, grads)
        own = {name: self.step.held[name] for name in self.homes[chunk]}
        velocity.before(own)
        made = super().updated(chunk, grads)
        velocity.after(own)
        return made

    def seen(self, shards: Mapping[str, Shards], firing: Firing, key: VariantKey, task: Name) -> Mapping[str, Shards]:
        """With those of the time at which a task reads, which is that of its chunk's queue."""
        chunk, number = task.chunk, firing.label
        if chunk not in self.homes:
            return shards  # nothing of it is trained
        updates, version = self.updates.get(chunk, 0), self.newest.get(chunk) or self.first(chunk)
        if chunk in self.velocity:
            if task.kind == "F":
                self.read[chunk, number] = updates
            else:
                own = {name: self.step.held[name] for name in self.homes[chunk]}
                version = self.version(chunk, self.velocity[chunk].back(own, updates - self.read[chunk, number]))
        return {**shards, **version.shards}


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
