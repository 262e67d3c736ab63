"""Memory: the bytes that a step takes at its peak on a rank, from when values are made and let go.

Inside a segment the traced graph says what is made, or an estimate where none can be traced; what kernels take for
themselves while they run is not seen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ....boxing.graph.physical import Physical
from ..compiler.inside import Estimate, Insides, insides
from ..instructions.computing import Forward, SegmentWork
from ..instructions.instruction import Storages, bytes_on
from ..instructions.offload import Stow
from ..instructions.order import Order, schedule
from ..instructions.overlap import Free
from ..lower.localise import Localiser
from ..lower.segments import Segment, Stage
from .equal_ranks import equal_ranks
from .resident import Resident

__all__ = ["Kept", "RankMemory", "bytes_on", "kept", "memory"]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. Parameters are those of all sources but inputs; activations what is live beside parameters
    and gradients when most is. `estimates` has of each segment that could not be traced the reason, and `moment` the
    values of the segment that runs when most is live. What is offloaded is `host` bytes of memory and `disk` bytes of
    files instead, and so many bytes are `stowed` in these in a step. Beside that stand `states`, which stay from step
    to step; and when optimizers step, `update` is there in the place of activations."""

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
    apart: bool = False,
) -> dict[int, RankMemory]:
    """The peak of every rank of the graph; equal ranks are worked out once. `apart`: of a micro-batch of a pipeline."""
    found = _ranks(graph, stages, localiser, regather, overlap, apart)
    peaks = [(ranks, _peak(plan, made)) for ranks, plan, made in found]
    return dict(sorted((rank, peak) for ranks, peak in peaks for rank in ranks))


class Kept(NamedTuple):
    """Memory left for the backward on a rank: bytes beside parameters, and values whose memory it is."""

    bytes: int
    values: frozenset[str]


def kept(graph: Physical, stages: Sequence[Stage], localiser: Localiser, *, regather: bool = True) -> dict[int, Kept]:
    """The memory that every rank keeps of a micro-batch from forward to backward."""
    found = _ranks(graph, stages, localiser, regather, False, True)
    left = [(ranks, _behind(plan, made)) for ranks, plan, made in found]
    return dict(sorted((rank, behind) for ranks, behind in left for rank in ranks))


def _ranks(
    graph: Physical, stages: Sequence[Stage], localiser: Localiser, regather: bool, overlap: bool | None, apart: bool
) -> Iterator[tuple[list[int], Order, Storages]]:
    """Equal ranks, what they do, and the memory of the first of them."""
    for ranks in equal_ranks(graph):
        rank, traced = ranks[0], {}
        for number, stage in enumerate(stages):
            if isinstance(stage, Segment) and rank in stage.placement:
                traced[number] = insides(localiser.segment(stage, rank))
        again = {
            n: tuple(stages[n].inputs[at] for at in made.again)
            for n, made in traced.items()
            if isinstance(made, Insides)
        }
        plan = schedule(graph, stages, again, regather=regather, overlap=overlap, apart=apart)
        yield ranks, plan, Storages(graph, stages, plan.layouts, plan.transfers, traced, rank)


def _behind(plan: Order, rank: Storages) -> Kept:
    """The values that are live between forward and backward."""
    runs = (at for at, do in enumerate(plan.todo) if isinstance(do, Forward) and not do.again)
    last = max(runs, default=-1)
    ends = takewhile(lambda do: isinstance(do, Free | Stow), plan.todo[last + 1 :])
    for do in (*plan.todo[: last + 1], *ends):
        do.effect(rank)
    values = frozenset(name for name, held in rank.first.items() if any(rank.uses[storage] for storage in held))
    return Kept(rank.live[None], values)


def _peak(plan: Order, rank: Storages) -> RankMemory:
    last = fullest = -1  # the segment that ran last, and the one when most was live
    for do in plan.todo:
        before = rank.most[None]
        do.effect(rank)
        if isinstance(do, SegmentWork):
            last = do.number
        if rank.most[None] > before:
            fullest = last
    gradients = sum(rank.size(plan.layouts[register]) for register in plan.grads.values())
    estimates = tuple(made.reason for made in rank.traced.values() if isinstance(made, Estimate))
    full = rank.stages[fullest] if fullest >= 0 else None
    moment = tuple(y.name for op in full.ops for y in op.outputs) if isinstance(full, Segment) else ()
    host, disk = rank.most["cpu"], rank.most["disk"]
    stowed = rank.stowed["cpu"], rank.stowed["disk"]
    most = max(rank.most[None] - gradients, 0)
    return RankMemory(rank.parameters, gradients, most, estimates, moment, host, disk, stowed)
