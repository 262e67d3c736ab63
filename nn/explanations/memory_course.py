"""The memory of a step's fullest rank over time, by the same accounts that its peak comes from."""

from collections.abc import Iterator

from ...boxing.graph.measures import Held
from ...boxing.graph.report.walked import MemoryCourse, MemoryMark
from ..graph.instructions.computing import Backward, SegmentWork, innermost
from ..graph.instructions.instruction import Storages
from ..graph.lower.localise import Localiser
from ..graph.lower.segments import Segment, segments
from ..graph.memory.liveness import inside_of_rank, run
from ..graph.pieces import Pieces
from ..graph.run.footprint import levels
from ..graph.run.program import Program
from ..graph.step import Step
from ..graph.tasks.straight import schedule

__all__ = ["memory_course"]

MARKS = 1200  # at most; of more, neighbours are one, with what is most of them
KINDS = {"F": "forward", "B": "backward", "W": "weights' gradients", "U": "update"}


def memory_course(step: Step, rank: int, held: Held) -> MemoryCourse:
    """The course of a rank that holds so much at its fullest."""
    pieces, program = step.plan.pieces, step.program
    if pieces is not None:
        marks = list(_piped(pieces, rank, held))
    else:
        assert isinstance(program, Program)
        marks = list(_straight(program, rank, held))
    return MemoryCourse(rank, held.parameters, held.states, _thinned(marks))


def _straight(program: Program, rank: int, held: Held) -> Iterator[MemoryMark]:
    """A mark for each segment and way, and one for the optimizers, which step when activations are gone."""
    graph, stages = program.graph, segments(program.graph)
    traced, again = inside_of_rank(stages, Localiser(graph), rank)
    plan = schedule(graph, stages, again, regather=program.backend != "autograd", overlap=program.overlap)
    memory = Storages(graph, stages, plan.layouts, plan.transfers, traced, rank)
    most, now = memory.live[None], MemoryMark("the start", (), 0, 0)
    for do in plan.todo:
        if isinstance(do, SegmentWork):
            yield now._replace(activations=max(0, most - now.gradients) + memory.constants)
            stage, way = stages[do.number], "backward" if isinstance(do, Backward) else "forward"
            names = tuple(y.name for op in stage.ops for y in op.outputs) if isinstance(stage, Segment) else ()
            where = _where(stage) if isinstance(stage, Segment) else ""
            now = MemoryMark(f"{way}{' again' * (way == 'forward' and do.again)} of {where}", names, 0, 0)
            most = 0
        before = memory.live[None]
        most = max(most, before + run([do], memory).peak)
        made = {s for register in plan.grads.values() for s in memory.held.get(register, ())}
        now = now._replace(gradients=sum(memory.bytes[storage] for storage in made))
    yield now._replace(activations=max(0, most - now.gradients) + memory.constants)
    if held.states or held.gradients:
        yield MemoryMark("update of the optimizers", (), held.gradients, max(0, held.total - _stay(held)))


def _where(stage: Segment) -> str:
    """The module around all ops of a segment; where it is the model itself, that of the first op, or its result."""
    first = stage.ops[0]
    return innermost([op.origin.module for op in stage.ops]) or first.origin.module or first.outputs[0].name


def _piped(pieces: Pieces, rank: int, held: Held) -> Iterator[MemoryMark]:
    """A mark for each firing of the rank's queue. What hops hold is there all the time."""
    found = list(levels(pieces.proved, rank, regather=pieces.options.backend != "autograd"))
    beside = held.total - _stay(held) - max((level.live - held.gradients for level in found), default=0)
    for level in found:
        words = [f"{KINDS.get(name[:1], name)} of micro-batch {label}" for name, label in level.ran.parts]
        activations = level.live - level.sums + max(0, beside)
        yield MemoryMark(" and ".join(words), (), level.sums, activations)


def _stay(held: Held) -> int:
    return held.parameters + held.gradients + held.states


def _thinned(marks: list[MemoryMark]) -> list[MemoryMark]:
    size = -(-len(marks) // MARKS)
    groups = (marks[at : at + size] for at in range(0, len(marks), size))
    return [max(group, key=lambda mark: mark.gradients + mark.activations) for group in groups] if marks else []
