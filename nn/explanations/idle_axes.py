"""Idle axes: a step splits nothing over them, so that all ranks along one do the same. Each says what the step would
take with the batch split over it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from ...boxing.figures import duration
from ...boxing.graph.physical import Physical
from ...placement import Placement
from ...sbp import Layout
from ...sbp.joint.solver.solve import Solver
from ..graph.plan import Planned

__all__ = ["IdleAxis", "idle_axes", "said_of_idle"]


class IdleAxis(NamedTuple):
    """An axis by its name, or its number where it has none, and its ranks. It is idle `on` a stage of a pipeline, where
    others split something over it."""

    name: str
    ranks: int
    on: str = ""


def idle_axes(graph: Physical) -> list[IdleAxis]:
    """The axes along which nothing lies in pieces or as addends: no value, gradient or state. In a pipeline also those
    along which that is so on some stages, but for the axis of the stages."""
    sources = [of for s in graph.sources for of in (s.home, s.master)]
    layouts = dict.fromkeys([*(value.layout for value in graph.values.values()), *sources])
    homes = {frozenset(of.placement.flat) for of in layouts}
    found: dict[IdleAxis, dict[frozenset[int], bool]] = {}
    has_stages = cache(lambda place, at: _has_stages(place, at, homes))
    for of in layouts:
        here = frozenset(of.placement.flat)
        for at, ranks in enumerate(of.placement.shape):
            if ranks > 1 and has_stages(of.placement, at):
                continue
            each = found.setdefault(IdleAxis(_name(of.placement, at), ranks), {})
            each[here] = each.get(here, True) and not _is_used(of, at)
    return [one for axis, idle in found.items() if axis.ranks > 1 for one in _on_stages(axis, idle)]


def _has_stages(place: Placement, at: int, homes: Collection[frozenset[int]]) -> bool:
    """Whether anything lies at one place of an axis alone."""
    grid = np.reshape([*place.flat], place.shape)
    return any(home <= frozenset(line.flat) for line in np.moveaxis(grid, at, 0) for home in homes)


def _on_stages(axis: IdleAxis, idle: Mapping[frozenset[int], bool]) -> Iterator[IdleAxis]:
    """The axis if nothing is split over it, or that of each stage on which nothing is."""
    if all(idle.values()):
        yield axis
    elif len(frozenset().union(*idle)) == sum(map(len, idle)):  # else they are no stages: some ranks are in several
        for at, ranks in enumerate(sorted(idle, key=min), 1):
            if idle[ranks]:
                yield axis._replace(on=f" on stage {at} of {len(idle)}")


def said_of_idle(plan: Planned, predicted: float) -> Iterator[str]:
    """A line on each idle axis of a step that takes so many seconds."""
    for axis in idle_axes(plan.graph):
        line = f"nothing is split over {axis.name}{axis.on}: its {axis.ranks} ranks do the same"
        seconds = None if axis.on else _with_batch_split(plan, axis)
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
    """The cost of the best open choice that splits the first dim of the batch over an axis. None where there is no such
    choice, because arguments lie already."""
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
