"""The order of a step that runs straight: the tasks of one chunk and one micro-batch, one behind the other."""

from collections.abc import Mapping, Sequence

from ....boxing.graph.physical import Physical
from ..instructions.order import Order
from ..instructions.overlap import freed, overlapped
from ..lower.registers import values_of
from ..lower.segments import Stage, kept
from .chunks import Chunks
from .tasks import tasks

__all__ = ["schedule"]


def schedule(
    graph: Physical,
    stages: Sequence[Stage],
    again: Mapping[int, Sequence[str]] | None = None,
    *,
    regather: bool = True,
    overlap: bool | None = None,
) -> Order:
    """The order of a graph's stages. `again` names the inputs that the backward of a segment takes again, by number.

    Inputs named in it change when values are freed, and nothing else. `overlap` has moves go on beside segments: None,
    where it pays; True, wherever they can.
    """
    whole = Chunks.whole(graph, stages)
    made = tasks(graph, stages, whole, again or {}, apart=None, regather=regather)
    todo = [do for task in made.tasks.values() for do in task.todo]
    if overlap is not False:
        todo = overlapped(todo, made.transfers, always=bool(overlap))
    names = sorted(kept(graph))
    values = dict(zip(names, values_of(names), strict=True))
    stay = {*values, *made.grads.values(), *(s.value.name for s in graph.sources)}
    return Order(tuple(freed(todo, stay)), made.transfers, made.layouts, values, made.grads)
