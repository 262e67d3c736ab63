"""Expectations of a plan, held against the physical graph that came out: moves counted, memory, time, what is gathered.

A plan is a test of itself: `plan.check()` raises where one of its `expect` lines fails, and so does the first step.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...boxing.figures import duration, volume
from ...boxing.graph.blocks import Blocks
from ...boxing.graph.move_table import MoveRow, each_move
from ...boxing.graph.physical import Physical
from ..explanations.step_report import explained
from ..graph.instructions.moves import MoveInstruction
from ..graph.instructions.overlap import Free
from ..graph.lower.segments import segments
from ..graph.step import Step
from ..graph.tasks.straight import schedule
from .language.plan_text import PlanText
from .language.statements import ExpectAtMost, ExpectGathered, ExpectMoves, Statement

__all__ = ["Expectation", "expected", "findings"]


@dataclass(frozen=True)
class Expectation:
    """One `expect` line with what was found."""

    line: Statement
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.holds else 'FAIL'} {self.line}: {self.found}"


def findings(plan: PlanText, step: Step, other: Mapping[str, float] | None = None) -> list[Expectation]:
    """Every `expect` line of a plan against a planned step. `other` has the seconds of plans that lines compare it
    with; without it such lines are left out."""
    lines = [line for line in plan.statements if isinstance(line, _EXPECTS)]
    if other is None:
        lines = [line for line in lines if not (isinstance(line, ExpectAtMost) and line.of is not None)]
    return [_finding(line, step, other or {}) for line in lines]


_EXPECTS = (ExpectMoves, ExpectGathered, ExpectAtMost)


def expected(plan: PlanText, found: Iterable[Expectation]) -> None:
    """Raise for the first line that does not hold, with that line."""
    wrong = next((finding for finding in found if not finding.holds), None)
    if wrong is not None:
        see = "python -m sbpflow explain PLAN MODEL, or print(plan.check(..., strict=False).report.full())"
        raise plan.wrong(wrong.line, "", f"this does not hold: {wrong.found}\n  see all moves: {see}")


def _finding(line: Statement, step: Step, other: Mapping[str, float]) -> Expectation:
    if isinstance(line, ExpectMoves):
        return _moves(line, step.graph, step.program.again)
    if isinstance(line, ExpectGathered):
        found = gathered_at_once(step)
        return Expectation(line, f"{found} layers' weights are gathered at once", found <= line.layers)
    assert isinstance(line, ExpectAtMost)
    if line.what == "memory":
        most = max((held.total for held in step.held().values()), default=0)
        return Expectation(line, f"the fullest rank takes {volume(most)}", most <= line.limit)
    seconds = explained(step).predicted or 0.0
    if line.of is None:
        return Expectation(line, f"a step is predicted to take {duration(seconds)}", seconds <= line.limit)
    of = other[line.of]
    return Expectation(line, f"{seconds / of:.3g} of {duration(of)}", seconds <= line.limit * of)


def _moves(line: ExpectMoves, graph: Physical, again: tuple[str, ...]) -> Expectation:
    """The counts of moves in a step; if each layer has its own, in the first one where they are wrong."""
    counts: dict[str, Counter[str]] = {}
    blocks = Blocks(graph)
    for block, row in each_move(graph, blocks, again):
        layer = block or blocks.of(row.name)  # a result that is moved for what follows is still the layer's
        counts.setdefault(layer if line.a_layer else "", Counter()).update(_kinds(row, line))
    if line.a_layer:
        counts = {block: counts.get(block, Counter()) for block in _layers(graph)}
        if not counts:
            return Expectation(line, "there are no repeated layers", False)
    else:
        counts.setdefault("", Counter())
    for block, found in counts.items():
        wrong = any(found[kind] > n or (found[kind] < n and not line.at_most) for n, kind in line.moves)
        if wrong:
            return Expectation(line, _said(found, line) + (f" in {block}" if block else ""), False)
    return Expectation(line, _said(next(iter(counts.values())), line), True)


def _kinds(row: MoveRow, line: ExpectMoves) -> Iterator[str]:
    directions = {"backward": ("backward", "again")}.get(line.direction or "", (line.direction,))
    if line.direction is not None and row.direction not in directions:
        return
    if row.free:
        return
    for way in row.ways:
        if line.over is None or any(line.over in axis.split("=") for axis in way.axes):  # data=expert: both
            yield _SAME.get(way.kind, way.kind)


_SAME = {"all_reduce_once": "all_reduce"}


def _said(found: Counter[str], line: ExpectMoves) -> str:
    kinds = [kind for _, kind in line.moves]
    return " and ".join(f"{found[kind]} {kind}" for kind in kinds)


def _layers(graph: Physical) -> list[str]:
    """The repeated blocks of the model, outermost ones."""
    return list(dict.fromkeys(step.origin.block for step in graph.steps if step.origin.block))


def gathered_at_once(step: Step) -> int:
    """The most layers of which gathered weights are there at any time of a step, by the order in which it runs."""
    graph = step.graph
    weights = {s.value.name for s in graph.sources if s.kind == "parameter"}
    root: dict[str, str] = {}
    for box in graph.boxes:
        of = root.get(box.source, box.source)
        if of in weights:
            root[box.output.name] = of
    blocks, sends = Blocks(graph), {box.output.name for box in graph.boxes if graph.boxing(box).sends}
    layer = {name: blocks.around(of) or of.rpartition(".")[0] for name, of in root.items() if name in sends}
    most, held = 0, Counter[str]()
    for do in schedule(graph, segments(graph)).todo:
        if isinstance(do, MoveInstruction):
            held.update(layer[y.of] for y in do.writes if y.of in layer and not y.is_gradient)
        elif isinstance(do, Free):
            held.subtract(layer[x.of] for x in do.reads if x.of in layer and not x.is_gradient)
        most = max(most, sum(count > 0 for count in held.values()))
    return most
