"""The seconds of a step's moves that its order hides beside computing, played on a clock: nothing runs.

segments   ==A==   ==B==           ==C==        a rank computes one thing after the other
moves           ---a---b---b---             and its link carries one move after the other
                           ^^^^ waited for: not hidden
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...boxing.boxing import between
from ...boxing.graph.buckets import packed
from ...sbp.joint.op_cost import NOTHING, OpSeconds
from ..graph.instructions.computing import Backward, FirstHalf, SecondHalf, SegmentWork
from ..graph.instructions.instruction import Instruction
from ..graph.instructions.moves import MoveInstruction, MoveNow, StartMove, WaitForMove
from ..graph.lower.registers import Transfer
from ..graph.lower.segments import Segment, Stage

__all__ = ["PlayedTask", "hidden_seconds", "played"]


class PlayedTask(NamedTuple):
    """A segment or a move of a list, from when to when in seconds."""

    do: SegmentWork | MoveInstruction
    start: float
    end: float

    @property
    def spent(self) -> float:
        return self.end - self.start


def played(
    todo: Iterable[Instruction], stages: Sequence[Stage], transfers: Sequence[Transfer], costs: Mapping[str, OpSeconds]
) -> Iterator[PlayedTask]:
    """The segments and moves of a list by the clock of a rank; `costs` are those of ops, by the names of their first
    results."""
    now = link = 0.0
    due: dict[int, float] = {}
    for do in todo:
        if isinstance(do, SegmentWork):
            start, now = now, now + _computing(do, do.segment(stages), costs)
            yield PlayedTask(do, start, now)
        elif isinstance(do, MoveNow | StartMove):
            spent, start = _moving(transfers[do.number]), max(link, now)
            link = start + spent
            yield PlayedTask(do, start, link)
            if isinstance(do, StartMove):
                due[do.number] = link
            elif spent:
                now = link
        elif isinstance(do, WaitForMove):
            now = max(now, due.pop(do.number))


def hidden_seconds(tasks: Iterable[PlayedTask]) -> float:
    """Seconds by which a list ends sooner than if each move were waited for where it starts."""
    computing = moving = end = 0.0
    for task in tasks:
        if isinstance(task.do, SegmentWork):
            computing += task.spent
        else:
            moving += task.spent
        end = max(end, task.end)
    return moving - (end - computing)


def _computing(do: SegmentWork, segment: Segment, costs: Mapping[str, OpSeconds]) -> float:
    """Seconds of a segment one way: half of a backward each makes the gradients of its inputs and of its weights."""
    found = 0.0
    for op in segment.ops:
        seconds = costs.get(op.outputs[0].name, NOTHING)
        trained = any(value.grad for value in op.outputs)
        if isinstance(do, FirstHalf | SecondHalf):
            found += seconds.backward / 2 * trained
        elif isinstance(do, Backward):
            found += seconds.backward * trained
        else:
            found += seconds.forward
    return found


def _moving(transfer: Transfer) -> float:
    """Seconds of a move by its own routes, of a bucket by that of all its members."""
    if transfer.together and not transfer.encodings:
        bucket = packed(transfer.pairs)
        return between(bucket.src, bucket.dst).price.time
    return sum(way.price.time for way in transfer.plans)
