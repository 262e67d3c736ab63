"""Idle axes: those of a grid over which a step splits nothing, so that all ranks along one do the same; and what the
step would take with the batch split over it."""

from collections.abc import Iterator
from typing import NamedTuple

from ...boxing.graph.physical import Physical
from ...boxing.picture.palette import duration
from ...placement import Placement
from ...placement.errors import SbpflowError
from ...sbp.layout import Layout
from ...sbp.signature import S
from ...sbp.text import Pin
from .plan import Planned

__all__ = ["IdleAxis", "idle_axes", "said_of_idle"]


class IdleAxis(NamedTuple):
    """An axis by its name, or its number where it has none, and how many ranks it has."""

    name: str
    ranks: int


def idle_axes(graph: Physical) -> list[IdleAxis]:
    """The axes along which no value lies in pieces or as addends, wherever they occur, nor gradients and states."""
    sources = [of for s in graph.sources for of in (s.home, s.master)]
    found: dict[IdleAxis, bool] = {}
    for of in dict.fromkeys([*(value.layout for value in graph.values.values()), *sources]):
        for at, ranks in enumerate(of.placement.shape):
            axis = IdleAxis(_name(of.placement, at), ranks)
            found[axis] = found.get(axis, True) and not _is_used(of, at)
    return [axis for axis, idle in found.items() if idle and axis.ranks > 1]


def said_of_idle(plan: Planned, predicted: float) -> Iterator[str]:
    """A line on each idle axis of a step that takes so many seconds."""
    for axis in idle_axes(plan.graph):
        line = f"nothing is split over {axis.name}: its {axis.ranks} ranks do the same"
        seconds = _with_batch_split(plan, axis)
        if seconds is not None:
            share = seconds / plan.decided.solution.cost if plan.decided.solution.cost else 1.0
            change = abs(share - 1) * predicted
            more = f"{duration(change)} {'less' if share < 1 else 'more'}"
            line += f"; the batch split over it, a step would take {duration(share * predicted)}, {more}"
        yield line


def _name(place: Placement, at: int) -> str:
    return place.names[at] if place.names else f"axis {at}"


def _is_used(of: Layout, at: int) -> bool:
    return at in of.state.split or at in of.state.partial


def _with_batch_split(plan: Planned, axis: IdleAxis) -> float | None:
    """The cost of the best choice in which the first dim of all arguments is split over an axis; None where some lie
    already, or have no such dim, or none can be made so."""
    inputs = {s.name: s.fake for s in plan.logical.sources if s.kind == "input"}
    given = [name for name in (plan.pieces.batch.inputs if plan.pieces else inputs) if name in inputs]
    samples = next((inputs[name].shape[0] for name in given if inputs[name].ndim), 0)
    homes = {n: plan.graph.layout(n).placement for n in given if inputs[n].shape[:1] == (samples,)}
    if plan.lies or not homes:
        return None
    flows = dict(plan.passes.flows)
    for name, place in homes.items():
        at = next((at for at in range(place.ndim) if _name(place, at) == axis.name), None)
        if at is None:
            return None
        entries = list(flows[name].on(place, inputs[name].ndim)) if name in flows else [None] * place.ndim
        entries[at] = S(0)
        flows[name] = Pin(tuple(entries), what=f"the argument {name}")
    rounds = plan.decided.formulated.costs.demands.rounds
    asked = None if rounds is None else lambda _: rounds
    try:
        found = plan.passes.flowing(flows).decided(plan.logical, inputs, plan.options.memory, rounds=asked)
    except SbpflowError:
        return None
    return found.solution.cost
