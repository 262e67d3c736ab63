"""Recomputation: the parts of a forward that are run once more for the backward, so that little of them is kept.

An op whose origin names a region belongs to it; `torch.utils.checkpoint` makes regions, and a plan may. The forward
keeps a region's inputs, and lets go its values when nobody needs them any more. The backward runs the region again
before it goes through it: its segments, the moves that are its own, and its random numbers, which are drawn again as
they were. Moves of weights that are made once a step, and those between groups of a pipeline, stay.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ....boxing.graph.physical import Box, Physical
from ....sbp.logical import Origin
from .segments import Draw, PartStage, Segment, Stage, kept, made_by

__all__ = ["Recomputed", "recomputed"]


@dataclass(frozen=True)
class Recomputed:
    """`of` is the region of a stage, `runs` the stages of a region that its backward runs again, in order. Stages that
    are `kept` are run once; what their backward reads, the region makes again."""

    of: Mapping[int, Hashable]
    runs: Mapping[Hashable, tuple[int, ...]]
    kept: Mapping[int, Hashable] = field(default_factory=dict)

    def draws(self, stage: int) -> bool:
        """Whether a stage's numbers are drawn again."""
        return stage in self.of and stage in self.runs.get(self.of[stage], ())


def recomputed(
    graph: Physical,
    stages: Sequence[Stage],
    chunk: Sequence[int | None] | None = None,
    once: Collection[int] = (),
) -> Recomputed:
    """The regions of a graph's stages; one that is of several chunks is several. `once` are moves made only once."""
    of: dict[int, Hashable] = {}
    around: dict[int, Hashable] = {}
    for n, stage in enumerate(stages):
        origin = None if isinstance(stage, Box | PartStage) else _origin(stage)  # a part need not do the same twice
        if origin and origin.recompute:
            of[n] = origin.recompute, None if chunk is None else chunk[n]
        elif origin and origin.kept_of:
            around[n] = origin.kept_of, None if chunk is None else chunk[n]
    if not of:
        return Recomputed({}, {})
    ends = {*kept(graph), *(given for _, given in graph.losses if given is not None)}
    readers: dict[str, set[Hashable]] = {name: {None} for name in ends}
    for n, stage in reversed(list(enumerate(stages))):
        if isinstance(stage, Box):
            users = readers.get(stage.output.name, {None})
            if len(users) == 1 and None not in users and n not in once and not saves(graph, stage):
                (of[n],) = users
        for name in stage.inputs:
            readers.setdefault(name, set()).add(of.get(n, around.get(n)))
    inside: dict[Hashable, list[int]] = {region: [] for region in of.values()}
    around = {n: region for n, region in around.items() if region in inside}
    for n, region in sorted((of | around).items()):
        inside[region].append(n)
    return Recomputed(of, {region: _runs(stages, numbers, around) for region, numbers in inside.items()}, around)


def _origin(stage: Segment | Draw) -> Origin:
    return (stage.ops[0] if isinstance(stage, Segment) else stage.op).origin


def saves(graph: Physical, box: Box) -> bool:
    """Whether the forward of a move keeps for its backward who held a maximum."""
    state = graph.layout(box.source).state
    if not state.partial or state.reduction == "sum" or state == box.output.layout.state:
        return False
    return any(move.of == box.output.name and move.into != move.of for move in graph.backs)


def _runs(stages: Sequence[Stage], inside: Sequence[int], around: Collection[int]) -> tuple[int, ...]:
    """The stages of a region with a backward, and those that make what these need, or the backward of kept ones."""
    runs: list[int] = []
    needed: set[str] = set()
    for n in reversed(inside):
        stage = stages[n]
        learns = isinstance(stage, Segment) and stage.wants
        if n in around:
            needed = needed.difference(made_by(stage)).union(stage.inputs if learns else ())
        elif learns or not needed.isdisjoint(made_by(stage)):
            runs.append(n)
            needed.update(stage.inputs)
    return tuple(runs[::-1])
