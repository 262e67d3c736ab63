"""Schedules of a pipelined step for its page: the simulated one, and that of its last run."""

import re
from collections.abc import Callable, Iterable, Iterator

from ...actors.protocol.simulate import Ran
from ...actors.timeline.advice import is_wire
from ...boxing.graph.report.walked import ScheduledTask, TaskSchedule
from ...placement.world import world
from ..graph.lower.segments import Segment
from ..graph.pieces import Pieces
from .step_timeline import timeline

__all__ = ["chunk_values", "task_schedules"]

TASK = re.compile(r"([FBWU])(\d+)(?:\.\d+)?")


def task_schedules(pieces: Pieces) -> Iterator[TaskSchedule]:
    """The simulated schedule, and the real one where this process has run all of it."""
    count = len(pieces.first.variant.where.group)  # a second route numbers its chunks from there on
    yield TaskSchedule("simulated", tuple(_tasks(pieces.simulation().firings, count)))
    if world().rank is None and pieces.program.outcome is not None:
        ran = timeline(pieces.program)
        if ran is not None:
            firings = [each for _, each in ran.step.records]
            start = min((each.start for each in firings), default=0.0)
            yield TaskSchedule("real", tuple(_tasks(firings, count, ran.wire, start)))


def chunk_values(pieces: Pieces) -> list[list[str]]:
    """The values that each chunk makes."""
    variant = pieces.first.variant
    found: list[list[str]] = [[] for _ in variant.where.group]
    for chunk, stage in zip(variant.where.of, variant.stages, strict=True):
        if chunk is not None and isinstance(stage, Segment):
            found[chunk] += (y.name for op in stage.ops for y in op.outputs)
    return found


def _tasks(
    firings: Iterable[Ran], count: int, wire: Callable[[str], bool] = is_wire, start: float = 0.0
) -> Iterator[ScheduledTask]:
    for ran in sorted(firings, key=lambda ran: (ran.queue, ran.start)):
        found = [TASK.fullmatch(name) for name, _ in ran.parts]
        chunks = tuple(int(task[2]) % count for task in found if task)
        kind = "move" if wire(ran.queue) or not chunks else next(task[1] for task in found if task)
        name = " & ".join(f"{task} of micro-batch {label}" for task, label in ran.parts)
        yield ScheduledTask(ran.queue, name, kind, ran.start - start, ran.end - start, chunks)
