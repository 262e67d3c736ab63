"""Answers: a planned step's plan as text, with all said that was left open, and what each line costs.

Lines that left something to the planner are gone, and what it chose stands in their place; `limit` became `expect`.
Names that differ in the numbers of layers alone are one line.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from ...boxing.figures import duration, volume
from ...boxing.graph.report.report import Report
from ...placement import Placement
from ...sbp import Broadcast, Layout, Sbp
from ..explanations.step_report import explained
from ..graph.choose.blocks_again import blocks_of_ops
from ..graph.step import Step
from .assignment import Assignment
from .language.statements import AxisEntries, DrawBy, ExpectAtMost, Flow, Grid, GridAxis, Input, Kind, Limit, Rest, Seek

__all__ = ["answer"]

Rests: TypeAlias = dict[str, AxisEntries]  # by names of parameters


def answer(step: Step, given: Assignment | None, known: Report | None = None) -> str:
    """The text of the plan by which a step runs; `given` is what was asked for, and `known` its report."""
    report = known or explained(step)
    most = report.memory.fullest if report.memory else 0
    head = f"# {duration(report.predicted or 0.0)} a step, {volume(most)} on the fullest rank, as predicted"
    by = [f"# priced by {report.devices}"] if report.devices else []
    lines = [head, *by, *(_said(given) if given is not None else _by_hand(step))]
    chosen = [*_chosen(step, given, report), *_again(step)]
    lines += ["# chosen:", *chosen] if chosen and given is not None else chosen
    if report.cut:
        lines.append(f"# {report.cut}")
    return "\n".join(lines) + "\n"


def _said(given: Assignment) -> Iterator[str]:
    """The lines of a plan that say something by themselves."""
    for line in given.plan.lines:
        statement = line.statement
        if isinstance(statement, Grid):
            whole = given.grids.whole
            if statement.placement is None:
                sizes = dict(zip(whole.names or (), whole.shape, strict=False))
                axes = tuple(replace(a, size=sizes.get(a.name, a.size)) for a in statement.axes)
                yield str(replace(statement, axes=axes, type=whole.type))
                continue
        if isinstance(statement, Limit):
            yield str(ExpectAtMost("memory", statement.memory))
        elif isinstance(statement, Rest | Flow | Input) and _open(statement.entries):
            yield f"# {line.text.strip()}"
        elif not isinstance(statement, Seek):
            yield line.text


def _open(entries: AxisEntries) -> bool:
    return entries is None or any(entry is None for _, entry in entries)


def _by_hand(step: Step) -> Iterator[str]:
    """The grid and the schedule of a step that no plan was given for."""
    places = dict.fromkeys(s.value.layout.placement for s in step.graph.sources)
    whole = step.plan.options.placement
    if whole is not None and whole.names and len(places) == 1:
        axes = tuple(GridAxis(name, size) for name, size in zip(whole.names, whole.shape, strict=True))
        yield str(Grid(axes, whole.type))
    else:
        for place in places:
            yield f"# on {place}"
    options = step.plan.options
    if options.piped and len(places) == 1 and options.schedule is None and options.slices is None:
        yield f"{options.micro_batches} micro-batches"
    elif options.piped:
        yield f"# by {options.policy.name}, {options.micro_batches} micro-batches"
    if options.draws != "batch":
        yield str(DrawBy(each=True))


def _chosen(step: Step, given: Assignment | None, report: Report) -> Iterator[str]:
    """Lines on the rest of parameters that the plan leaves open, each kind where it differs from the one before."""
    open_names = None if given is None else given.left_open
    spent = _spent(report)
    trained = {s.value.name: s for s in step.graph.sources if s.kind == "parameter"}
    sources = {name: s for name, s in trained.items() if open_names is None or name in open_names}
    rests: dict[Kind, Rests] = {"weights": {n: _entries(s.value.layout) for n, s in sources.items()}}
    apart = {n: s for n, s in sources.items() if {s.home.state, s.master.state} != {s.value.layout.state}}
    rests["grads"] = {n: _entries(s.home) for n, s in apart.items() if not s.once}  # else as where nothing is said
    rests["states"] = {n: _entries(s.master) for n, s in sources.items() if s.master.state != s.value.layout.state}
    for kind, of in rests.items():
        for path, entries, names in _grouped(of, trained):
            if entries or kind != "weights":
                seconds = sum(spent.get(name, 0.0) for name in names)
                place = sources[names[0]].value.layout.placement
                said = f"{Rest(path, entries or _whole(place), (kind,))}  # {duration(seconds)}"
                yield said if place.names else f"# {said}"  # a plan knows axes by names


def _again(step: Step) -> Iterator[str]:
    """The blocks that the backward runs again so that all fits, those of one list that are all there as one line."""
    blocks = step.plan.decided.again
    every = {block for block in blocks_of_ops(step.plan.decided.logical) if block}
    for family in dict.fromkeys(map(_family, blocks)):
        mine, whole = ([block for block in of if _family(block) == family] for of in (blocks, every))
        yield from (f"recompute {path}" for path in ([family] if len(mine) == len(whole) else mine))


def _whole(place: Placement) -> AxisEntries:
    return tuple((name, Broadcast()) for name in place.names or ())


def _entries(of: Layout) -> AxisEntries:
    """The axes along which it is cut."""
    found: list[tuple[str, Sbp | None]] = []
    place: Placement = of.placement
    for axis, sbp in enumerate(of.sbp):
        if not isinstance(sbp, Broadcast) and place.shape[axis] > 1:
            found.append((place.names[axis] if place.names else str(axis), sbp))
    return tuple(found)


def _grouped(of: Rests, all_names: Mapping[str, object]) -> Iterator[tuple[str, AxisEntries, list[str]]]:
    """Names that differ in numbers alone and lie alike as one pattern, if it meets no other."""
    families: dict[str, list[str]] = {}
    for name in of:
        families.setdefault(_family(name), []).append(name)
    everybody: dict[str, int] = {}
    for name in all_names:
        everybody[_family(name)] = everybody.get(_family(name), 0) + 1
    for family, names in families.items():
        if len({of[name] for name in names}) == 1 and everybody[family] == len(names):
            yield family, of[names[0]], names
        else:
            for name in names:
                yield name, of[name], [name]


def _family(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _spent(report: Report) -> dict[str, float]:
    """The seconds of the moves of each parameter, its gradient and its update."""
    found: dict[str, float] = {}
    for seconds in (report.account.each, report.account.late) if report.account else ():
        for (name, _), spent in seconds.items():
            found[name] = found.get(name, 0.0) + spent
    return found
