"""The bytes that a step is told to send, with all of its micro-batches, beside those that it sent."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from sbpflow.boxing.graph.blocks import Blocks
from sbpflow.boxing.graph.move_table import MoveRow, each_move
from sbpflow.boxing.graph.physical import Box
from sbpflow.nn.graph.instructions.order import moved_again
from sbpflow.nn.graph.run.variant import Variant
from sbpflow.nn.graph.tasks.gradient_homes import brought_each_time

__all__ = ["planned_bytes"]


def planned_bytes(step: Any) -> int:
    """The bytes that all ranks send: every move of each micro-batch, and, once a step, those of weights, of their
    gradients home and of what optimizers changed. Pipelines are to have one route, and a flush."""
    plan = step.planned.plan
    if plan.pieces is None:
        return sum(row.total for _, row in each_move(step.physical, Blocks(step.physical), step.planned.program.again))
    proved, found = plan.pieces.proved, 0
    for at, (key, many) in enumerate(Counter(proved.keys).items()):
        home = key not in proved.weights.added_to  # else gradients come home with those of another kind
        once = {"update": at == 0, "backward": home}
        rows = _rows(proved.variants[key])
        found += sum(row.total * (many if often else once.get(row.direction, True)) for row, often in rows)
    return found


def _rows(variant: Variant) -> Iterator[tuple[MoveRow, bool]]:
    """Each move of a micro-batch's graph, and whether it is made for every micro-batch."""
    graph, stages, where = variant.graph, variant.stages, variant.where
    late = {box.output.name for at in where.once if isinstance(box := stages[at], Box)}
    home = where.homeward(stages).keys() - brought_each_time(graph, stages, where).keys()
    again = moved_again(do for task in variant.tasks.tasks.values() for do in task.todo)
    for _, row in each_move(graph, Blocks(graph), again):
        lasting = {"forward": late, "again": late, "backward": home}.get(row.direction, set(row.ends))
        yield row, not lasting.issuperset(row.ends)
