"""Ranks that go in step: those which move something among each other inside the tasks of a step, and so wait there for
the slowest of them.

Other ranks meet once a step, as copies of a model do that data has: their gradients come together behind all tasks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...boxing.boxing import between
from ...boxing.graph.physical import Physical
from ...boxing.graph.report.report import Report
from ...placement import Placement
from ...sbp import B, Layout
from ..graph.step import Step

__all__ = ["Lockstep", "lockstep"]


@dataclass(frozen=True)
class Lockstep:
    """The copies of a model that wait for each other once a step; and how many ranks of a copy go `together` on the
    queue of each stage."""

    copies: int
    together: Mapping[str, int]


class _Group(NamedTuple):
    """Ranks along axes of a placement, between which something moves."""

    placement: Placement
    axes: tuple[int, ...]


def lockstep(step: Step, report: Report) -> Lockstep:
    """The ranks of a step that wait for each other inside of tasks."""
    pieces, graph = step.plan.pieces, report.graph
    if pieces is None:
        ranks = {rank for value in graph.values.values() for rank in value.layout.placement.flat}
        stages = {"device 0": tuple(ranks)}
    else:
        stages = {queue: ranks for queue, ranks in pieces.proved.places.items() if queue.startswith("device ")}
    with graph.priced():
        first = _joined(dict.fromkeys(_waited(report)))
    copies = min(len({first.get(rank, rank) for rank in ranks}) for ranks in stages.values())
    return Lockstep(copies, {queue: max(1, len(ranks) // copies) for queue, ranks in stages.items()})


def _waited(report: Report) -> Iterator[_Group]:
    """Where something moves for which a task waits: no gradient of a weight, no result that nothing reads, and no loss:
    a single number is nothing that products wait for."""
    graph, account = report.graph, report.account
    read = {name for step in graph.steps for name in step.inputs} | {box.source for box in graph.boxes}
    weights = _weights(graph)
    once = {root for root, way in account.late if way == "forward" and account.once((root, way))} if account else set()
    for box in graph.boxes:
        late = box.source in once or box.output.name not in read or box.output.layout.numel == 1
        if not late and box.output.name not in graph.copied:
            yield from _moving(graph.layout(box.source), box.output.layout)
    for back in graph.backs:
        if back.into not in weights:
            yield from _moving(back.src, back.dst)


def _moving(src: Layout, dst: Layout) -> Iterator[_Group]:
    """The axes over which ranks get something to have a value otherwise; a hop to other ranks has none."""
    place = src.placement
    if place is dst.placement:
        axes = {at for at, sbp in enumerate(src.sbp) if sbp != B and sbp != dst.sbp[at]}
        axes |= {*src.state.seen_over, *dst.state.seen_over} if src.state.windows != dst.state.windows else set()
        if src.state != dst.state and axes:
            yield _Group(place, tuple(sorted(axes)))
    elif (turn := place.turn_to(dst.placement)) is not None:
        yield _Group(place, turn[:1])
    elif place.same_ranks(dst.placement):
        yield from (_Group(move.src.placement, move.axes) for move in between(src, dst).moves if move.axes)


def _weights(graph: Physical) -> set[str]:
    """The parameters and what they are moved to."""
    found = {source.value.name for source in graph.sources if source.kind == "parameter"}
    for box in graph.boxes:
        if box.source in found:
            found.add(box.output.name)
    return found


def _joined(groups: Iterable[_Group]) -> dict[int, int]:
    """For each rank that is in a group one that stands for all that are joined to it."""
    above: dict[int, int] = {}

    def top(rank: int) -> int:
        while (up := above.setdefault(rank, rank)) != rank:
            above[rank] = above[up]
            rank = up
        return rank

    for each in groups:
        for group in each.placement.groups(each.axes):
            first = top(group[0])
            for rank in group[1:]:
                above[top(rank)] = first
    return {rank: top(rank) for rank in above}
