"""Schedules of a step for its page: the simulated one, and of a pipelined step that of its last run.

A straight step has two queues, as each of its ranks has: what it computes, and the link that carries its moves.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ...actors.protocol.simulate import Ran
from ...actors.timeline.advice import is_wire
from ...boxing.graph.report.facts import Cost
from ...boxing.graph.report.walked import ScheduledTask, TaskSchedule
from ...placement.world import world
from ...sbp.joint.op_cost import OpSeconds
from ..graph.instructions.computing import Backward, SecondHalf, SegmentWork
from ..graph.instructions.moves import MoveNow, StartMove
from ..graph.lower.segments import Segment
from ..graph.pieces import Pieces
from ..graph.run.program import Program
from .hidden_moves import PlayedTask, played
from .step_timeline import collected, timeline

__all__ = ["by_the_clock", "chunk_values", "straight_schedule", "straight_values", "task_schedules"]

ALONE = "Times of other ranks are with them: have every rank call step.timeline(), then save the page on the first."
STRAIGHT = "A step that is no pipeline keeps no times of its own; a trace of torch.profiler has its modules and moves."
TASK = re.compile(r"([FBWU])(\d+)(?:\.\d+)?")


def task_schedules(pieces: Pieces) -> Iterator[TaskSchedule]:
    """The simulated schedule, and as much of the real one as this process knows without asking others."""
    count = len(pieces.first.variant.where.group)  # a second route numbers its chunks from there on
    yield TaskSchedule("simulated", tuple(_tasks(pieces.simulation().firings, count)))
    program, here = pieces.program, world().rank
    if program.outcome is None:
        return
    ran = timeline(program) if here is None else collected(program)
    if ran is not None:
        firings = [each for _, each in ran.step.records]
        yield TaskSchedule("real", tuple(_since_start(firings, count, ran.wire)))
    elif program.outcome.firings:
        name = f"real, of rank {here} alone"
        yield TaskSchedule(name, tuple(_since_start(program.outcome.firings, count, is_wire)), ALONE)


def _since_start(firings: Sequence[Ran], count: int, wire: Callable[[str], bool]) -> Iterator[ScheduledTask]:
    return _tasks(firings, count, wire, min((each.start for each in firings), default=0.0))


def by_the_clock(program: Program, costs: Iterable[Cost]) -> Iterator[PlayedTask]:
    """The segments and moves of a straight step, as a rank goes through them with these seconds of its ops."""
    order = program.planned
    spent_on = {str(cost.of): OpSeconds(cost.seconds - cost.backward, cost.backward) for cost in costs}
    return played(order.todo, program.stages, order.transfers, spent_on)


def straight_schedule(program: Program, costs: Iterable[Cost], update: float) -> TaskSchedule:
    """The schedule of a straight step, which ends with the `update` of its optimizers. Its segments are chunks by their
    numbers, and behind these its moves by theirs."""
    stages, transfers = program.stages, program.planned.transfers
    tasks: list[ScheduledTask] = []
    for do, start, end in by_the_clock(program, costs):
        if isinstance(do, SegmentWork):
            kind = "W" if isinstance(do, SecondHalf) else "B" if isinstance(do, Backward) else "F"
            tasks.append(ScheduledTask("computing", do.words(stages), kind, start, end, (do.number,)))
        elif end > start:
            words = do.words(transfers[do.number])
            tasks.append(ScheduledTask("moves", words, "move", start, end, (len(stages) + do.number,)))
    end = max((task.end for task in tasks), default=0.0)
    tasks += [ScheduledTask("computing", "update of the optimizers", "U", end, end + update)] * bool(update)
    return TaskSchedule("simulated", sorted(tasks, key=lambda task: (task.queue, task.start)), STRAIGHT)


def straight_values(program: Program) -> list[list[str]]:
    """The values that each segment makes, and behind these those that each move brings or is for."""
    made = [[y.name for op in s.ops for y in op.outputs] if isinstance(s, Segment) else [] for s in program.stages]
    order = program.planned
    moved: list[list[str]] = [[] for _ in order.transfers]
    for do in order.todo:
        if isinstance(do, MoveNow | StartMove):
            moved[do.number] = [str(x.of or x) for x in do.values(order.transfers[do.number])]
    return made + moved


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
