"""Memory: the bytes that a step takes at its peak on a rank, from when values are made and let go.

Inside a segment the traced graph says what is made, or an estimate where none can be traced; what kernels take for
themselves while they run is not seen.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ....boxing.graph.physical import Physical
from ....sbp.logical import OffloadPlace
from ..compiler.inside import Estimate, Insides, insides
from ..instructions.computing import AddToSum, SegmentWork
from ..instructions.instruction import Instruction, Storages, bytes_on
from ..lower.equal_ranks import equal_ranks
from ..lower.localise import Localiser
from ..lower.segments import PartStage, Segment, Stage
from ..tasks.straight import schedule
from .resident import Resident

__all__ = ["PLACES", "RankMemory", "TaskMemory", "bytes_on", "inside_of_rank", "memory", "run"]

PLACES: tuple[OffloadPlace, ...] = ("cpu", "disk")


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Parameters are those of buffers too; activations what is live beside parameters and gradients
    when most is, with constants, such as a table that is no buffer: they are cut anew for every step. So many of these
    are `lasting`: sums of gradients beyond what comes home, and what is made once. `estimates` has of each segment that
    could not be traced the reason, and `moment` the values of the segment that runs when most is live. What is
    offloaded is `host` bytes of memory and `disk` bytes of files instead, and so many bytes are `stowed` in these in a
    step. Beside that stand `states`, which stay from step to step; and when optimizers step, `update` is there in the
    place of activations."""

    parameters: int
    gradients: int
    activations: int
    estimates: tuple[str, ...] = ()
    moment: tuple[str, ...] = ()
    host: int = 0
    disk: int = 0
    stowed: tuple[int, int] = (0, 0)
    states: int = 0
    update: int = 0
    lasting: int = 0

    @classmethod
    def of(cls, rank: Storages, gradients: int, most: int, fullest: int) -> "RankMemory":
        """The memory of a rank where so much was there at most beside parameters, while this segment ran."""
        estimates = tuple(made.reason for made in rank.traced.values() if isinstance(made, Estimate))
        parts = (stage for stage in rank.stages if isinstance(stage, PartStage) and rank.rank in stage.placement)
        estimates += tuple(
            f"{of.op.origin.module or of.part.name} runs eagerly, and what it keeps inside is not counted"
            for of in parts
        )
        full = rank.stages[fullest] if fullest >= 0 else None
        moment = tuple(y.name for op in full.ops for y in op.outputs) if isinstance(full, Segment) else ()
        host, disk = (rank.most[place] for place in PLACES)
        stowed = rank.stowed["cpu"], rank.stowed["disk"]
        most = max(0, most - gradients) + rank.constants
        return cls(rank.parameters, gradients, most, estimates, moment, host, disk, stowed)

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.states + max(self.activations, self.update)

    def beside(self, parts: Iterable[Resident], rank: int) -> "RankMemory":
        """The same with what lies on the rank besides."""
        found = Counter[str]()
        for part in parts:
            here = part.bytes(rank)
            found[part.kind] = max(found[part.kind], here) if part.kind == "update" else found[part.kind] + here
        update = max(self.update, found.pop("update", 0))
        return replace(self, update=update, **{kind: getattr(self, kind) + more for kind, more in found.items()})


def memory(
    graph: Physical,
    stages: Sequence[Stage],
    localiser: Localiser,
    *,
    regather: bool = True,
    overlap: bool | None = None,
) -> dict[int, RankMemory]:
    """The peak of every rank of the graph; equal ranks are worked out once."""
    found: dict[int, RankMemory] = {}
    for ranks in equal_ranks(graph):
        traced, again = inside_of_rank(stages, localiser, ranks[0])
        plan = schedule(graph, stages, again, regather=regather, overlap=overlap)
        storages = Storages(graph, stages, plan.layouts, plan.transfers, traced, ranks[0])
        one = run(plan.todo, storages)
        gradients = sum(storages.size(plan.layouts[register]) for register in plan.grads.values())
        found |= dict.fromkeys(ranks, RankMemory.of(storages, gradients, storages.most[None], one.fullest))
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class TaskMemory:
    """Memory that things to do take on a rank: at most while they run, beside what was there before them, and what
    they leave, by place; less than nothing where they free more than they make. `fullest` is the segment that ran when
    most was live. The `first` that makes sums of gradients takes so many: what it makes are the sums, and stays."""

    peak: int = 0
    left: Mapping[OffloadPlace | None, int] = field(default_factory=lambda: dict.fromkeys((None, *PLACES), 0))
    fullest: int = -1
    first: int = 0


def run(todo: Iterable[Instruction], rank: Storages) -> TaskMemory:
    """The memory that things to do take on a rank, done there."""
    before = rank.live.copy()
    peak = first = rank.live[None]
    summed = 0
    last = fullest = -1
    for do in todo:
        start = rank.most[None] = rank.live[None]
        do.effect(rank)
        if isinstance(do, SegmentWork):
            last = do.number
        if rank.most[None] > peak:
            peak, fullest = rank.most[None], last
        most = rank.most[None] if rank.most[None] > start else rank.live[None]  # what only frees takes none
        first = max(first, most + summed)
        if isinstance(do, AddToSum):  # its parts are freed behind it
            summed += sum(rank.size(rank.layouts[part]) for part in do.reads)
    rank.most[None] = peak
    left = {place: rank.live[place] - before[place] for place in (None, *PLACES)}
    return TaskMemory(peak - before[None], left, fullest, first - before[None])


def inside_of_rank(
    stages: Sequence[Stage], localiser: Localiser, rank: int
) -> tuple[dict[int, Insides | Estimate], dict[int, tuple[str, ...]]]:
    """The bytes inside of the segments that run on a rank, and which inputs their backwards take again."""
    mine = [(n, stage) for n, stage in enumerate(stages) if isinstance(stage, Segment) and rank in stage.placement]
    traced = {n: insides(localiser.segment(stage, rank)) for n, stage in mine}
    again = {n: tuple(stages[n].inputs[at] for at in x.again) for n, x in traced.items() if isinstance(x, Insides)}
    return traced, again
