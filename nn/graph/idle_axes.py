"""Idle axes: those of a grid over which a step splits nothing, so that all ranks along one do the same; and what the
step would take with the batch split over it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...boxing.graph.physical import Physical
from ...boxing.picture.palette import duration
from ...placement import Placement
from ...sbp import Layout
from ...sbp.joint.solver.solve import Solver
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
    """The cost of the best choice of those that were open in which the first dim of the batch is split over an axis;
    None where there is none, as where arguments lie already."""
    sources, posed = plan.decided.logical.sources, plan.decided.formulated
    given = {s.name: s.fake for s in sources if s.kind == "input"}
    if plan.pieces is not None:
        given = {name: given[name] for name in plan.pieces.batch.inputs if name in given}
    samples = next((x.shape[0] for x in given.values() if x.ndim), 0)
    costs = list(posed.problem.costs)
    for n, node in enumerate(posed.nodes):
        if node.kind == "source" and (fake := given.get(sources[node.index].name)) is not None:
            place = plan.graph.layout(sources[node.index].name).placement
            at = next((at for at in range(place.ndim) if _name(place, at) == axis.name), None)
            if fake.shape[:1] == (samples,):
                splits = [at in stored.lie.state.dims[0] for stored in node.candidates]
                costs[n] = np.where(splits, node.cost, np.inf)
    problem = replace(posed.problem, costs=tuple(costs))
    if not samples or any(np.isinf(cost).all() for cost in costs):
        return None
    found = Solver(problem).solve(problem.memory, None, branches=0)
    return found.cost if found.choice else None
