"""The data of a page: all that it shows of a report, as one value for JSON.

Texts and tables of candidates that come more than once stand in a pool, and are called by their numbers: equal layers
and equal ops are told once.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ....placement.cluster import Cluster
from ....placement.links import WAYS
from ...figures import duration, user_path, volume
from ...picture.palette import family
from ...routes.moves import LOCAL, Move
from ..move_table import MoveRow, axes_of
from ..physical import Op
from ..picture.scene import lie, look_of, op_name, shape_of
from .facts import Cost, GraphFacts, priced_ops
from .folded_graph import FoldedGraph, GraphNode
from .lines import change, headline, time_line
from .step_parts import LOOKS, step_parts
from .summary import away
from .walked import Candidates, MemoryCourse, TaskSchedule

__all__ = ["page_data"]

TASKS = 4000  # of a schedule that a page draws
Json = dict[str, Any]


def page_data(facts: GraphFacts) -> Json:
    """The value, in lists, dicts, numbers and text."""
    with facts.graph.priced():
        return _PageData(facts).made()


class _Pool:
    """Values that are told once: each has a number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, key: Hashable, value: Any = None) -> int:
        """The number of a key, whose value is itself unless one is given."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self._numbers[key]


class _PageData:
    """The data of one page in the making."""

    def __init__(self, facts: GraphFacts) -> None:
        self.facts, self.graph, self.walked = facts, facts.graph, facts.walk()
        self.folded = FoldedGraph(facts.graph)
        self.text, self.tables = _Pool(), _Pool()
        self.costs = {id(op): cost for op, cost in priced_ops(facts.graph, facts.costs) if cost}
        self.limited = facts.memory is not None and facts.memory.limit is not None
        self.moves = [row for row in facts.moves if not row.free]
        keys = ((row.direction, end, at) for at, row in enumerate(self.moves) for end in row.ends)
        self.move_at = {(direction, end): at for direction, end, at in keys}

    def made(self) -> Json:
        facts, folded = self.facts, self.folded
        return {
            "name": facts.graph.name,
            "head": headline(facts).partition(": ")[2],
            "figures": [list(figure) for figure in _figures(facts)],
            "parts": [[part, seconds, LOOKS[part].fill] for part, seconds in step_parts(facts).items()],
            "notes": [list(note) for note in _notes(facts)],
            "groups": [[g.title, g.path, g.parent, g.kind, g.times] for g in folded.groups],
            "nodes": [self._node(node) for node in folded.nodes],
            "edges": [self._edge(edge.tail, edge.head, edge.value) for edge in folded.edges],
            "moves": [self._move(row) for row in self.moves],
            "memory": self._memory(),
            "course": self.walked.memory and self._course(self.walked.memory),
            "schedules": [self._schedule(schedule) for schedule in self.walked.schedules],
            "chunks": [self._nodes_of(names) for names in self.walked.chunks],
            "tables": self.tables.values,
            "texts": self.text.values,
        }

    def _tensor(self, name: str) -> list[Any]:
        """A value as inputs and outputs of ops are told: its name, shape, dtype and signature."""
        of = self.graph.layout(name)
        dtype = str(of.dtype).removeprefix("torch.")
        called = self.graph.called.get(name, name)
        return [self.text(called), self.text(shape_of(of)), self.text(dtype), self.text(lie(of))]

    def _node(self, node: GraphNode) -> Json:
        step = node.step
        moves = dict.fromkeys(self.move_at[key] for key in node.moves if key in self.move_at)
        told: Json = {"kind": node.kind, "label": node.label, "group": node.group, "times": node.times}
        told |= {"view": True} if node.view else {}
        told |= {"moves": list(moves)} if moves else {}
        if node.source is not None:
            told["outputs"] = [self._tensor(node.source.value.name)]
        if step is None:
            return told
        told["outputs"] = [self._tensor(y.name) for y in step.outputs]
        told["inputs"] = [self._tensor(name) for name in dict.fromkeys(step.inputs)]
        told["module"] = self.text(step.origin.module)
        told["line"] = self.text(user_path(step.origin.line))
        if not isinstance(step, Op):
            told |= self._box(node)
            return told
        told["op"] = op_name(step.op)
        told |= {"recomputed": True} if step.origin.recompute else {}
        if node.parameters:
            told["parameters"] = [self._tensor(name) for name in node.parameters]
        return told | self._priced(step)

    def _box(self, node: GraphNode) -> Json:
        """The words and the look of a move's node."""
        assert node.step is not None
        own = self.move_at.get(("forward", node.values[0]))
        at = own if own is not None else next((self.move_at[k] for k in node.moves if k in self.move_at), None)
        row = None if at is None else self.moves[at]
        return {
            "label": row.route if row else "nothing sent",
            "look": look_of([row.boxing]) if row else "free",
            "back": own is None,
        }

    def _priced(self, step: Op) -> Json:
        cost = self.costs.get(id(step))
        told: Json = {}
        if cost is not None:
            told |= {"seconds": _rounded(cost.seconds), "backward": _rounded(cost.backward)}
        found = self.walked.candidates(step.outputs[0].name)
        if found is not None:
            told |= {"candidates": self._table(found), "why": self.text(_why(found, step, limited=self.limited))}
        elif cost is not None and cost.runner_up:
            told["why"] = self.text(_runner_up(cost))
        return told

    def _table(self, found: Candidates) -> int:
        """The number of a table of candidates, the cheapest first: signature, own seconds, seconds more in all, and
        whether it was chosen."""
        rows = [
            [self.text(row.signature), _rounded(row.own), _rounded(found.more(k)), int(k == found.chosen)]
            for k, row in ((k, found.rows[k]) for k in found.order)
        ]
        return self.tables(tuple(map(tuple, rows)), rows)

    def _edge(self, tail: int, head: int, value: str) -> list[int]:
        of = self.graph.layout(value)
        return [tail, head, self.text(lie(of)), self.text(shape_of(of))]

    def _move(self, row: MoveRow) -> Json:
        return {
            "name": row.name,
            "direction": row.direction,
            "change": self.text(change(row.src, row.dst)),
            "route": row.route,
            "look": look_of([row.boxing]),
            "bytes": row.bytes,
            "total": row.total,
            "seconds": _rounded(row.seconds),
            "count": row.count,
            "once": row.once,
            "line": self.text(user_path(row.line)),
            "members": [self.graph.called.get(name, name) for name in dict.fromkeys(row.of)][:12],
            "steps": [self._route_step(move, n, row.boxing.cluster) for move, n in self._hops(row)],
            "nodes": self._nodes_of(row.ends),
        }

    def _hops(self, row: MoveRow) -> Iterator[tuple[Move, int]]:
        yield from zip(row.boxing.moves, row.boxing.busiest, strict=True)

    def _route_step(self, move: Move, nbytes: int, cluster: Cluster) -> list[Any]:
        """A step of a route: its kind, the signature behind it, bytes of the busiest rank, seconds, and its link."""
        words = ", ".join(axes_of(move.src.placement, move.axes)) if move.kind not in LOCAL else ""
        kind = f"{move.kind} over {words}" if words else move.kind
        return [kind, family(move.kind), lie(move.dst), nbytes, _rounded(move.price.time), _link(move, cluster)]

    def _nodes_of(self, names: Sequence[str]) -> list[int]:
        return sorted({self.folded.node_of[name] for name in names if name in self.folded.node_of})

    def _memory(self) -> Json | None:
        memory = self.facts.memory
        if memory is None:
            return None
        ranks = {
            str(rank): {**{k: v for k, v in asdict(held).items() if k != "moment"}, "away": away(held)}
            for rank, held in memory.ranks.items()
        }
        doubt = [memory.doubt] if memory.doubt else []
        again = f"to fit, the backward runs again: {', '.join(memory.again)}" if memory.again else ""
        return {"limit": memory.limit, "ranks": ranks, "notes": doubt + [again] * bool(again)}

    def _course(self, course: MemoryCourse) -> Json:
        marks = course.marks
        return {
            "rank": course.rank,
            "parameters": course.parameters,
            "states": course.states,
            "gradients": [mark.gradients for mark in marks],
            "activations": [mark.activations for mark in marks],
            "tasks": [self.text(mark.task) for mark in marks],
            "nodes": [self._nodes_of(mark.values[:64]) for mark in marks],
        }

    def _schedule(self, schedule: TaskSchedule) -> Json:
        queues = list(dict.fromkeys(task.queue for task in schedule.tasks))
        at = {queue: n for n, queue in enumerate(queues)}
        shown = schedule.tasks[:TASKS]
        return {
            "name": schedule.name,
            "queues": queues,
            "left": len(schedule.tasks) - len(shown),
            "end": max((task.end for task in schedule.tasks), default=0.0),
            "tasks": [
                [at[t.queue], self.text(t.name), t.kind, _rounded(t.start, 6), _rounded(t.end, 6), list(t.chunks)]
                for t in shown
            ],
        }


def _figures(facts: GraphFacts) -> Iterator[tuple[str, str]]:
    """The figures at the head of a page, each with its name."""
    each = " of a micro-batch" if facts.course else ""
    yield "step, predicted", "unknown" if facts.predicted is None else duration(facts.predicted)
    yield f"computing{each}", "unknown" if facts.compute is None else duration(facts.compute)
    yield f"moving{each}", duration(facts.moving)
    if facts.hidden is not None:
        yield f"hidden{each}", duration(facts.hidden)
    if facts.course:
        yield "bubble", f"{facts.course.bubble:.1%}"
    memory = facts.memory
    if memory is not None:
        yield "fullest rank", volume(memory.fullest) + (f" of {volume(memory.limit)}" if memory.limit else "")


def _notes(facts: GraphFacts) -> Iterator[tuple[str, str]]:
    """How the figures are known, each with a word for what it is about."""
    yield "time", time_line(facts)
    yield "choice", str(facts.solution or "unknown")
    said = {"devices": facts.devices, "links": facts.links, "cut": facts.cut, "frozen": facts.frozen}
    said["CUDA graph"] = facts.recorded
    yield from ((word, line) for word, line in said.items() if line)
    yield from (("eager", line) for line in facts.eager)
    yield from (("idle", line) for line in facts.idle)
    again, regions = facts.recomputed
    if again:
        yield "recomputed", f"{again} ops in {regions} regions run again in the backward"


def _why(found: Candidates, step: Op, *, limited: bool) -> str:
    """Why an op has the signature that it has, in a sentence."""
    order = found.order
    if len(order) == 1:
        return "It could have no other as its neighbours lie: its rule, or the plan, leaves this one."
    best = order[0]
    if best == found.chosen:
        other, more = found.rows[order[1]].signature, found.more(order[1])
        if more <= 0:
            return f"No other is cheaper; {other} costs as much."
        return f"The cheapest as its neighbours lie; the next, {other}, would take {duration(more)} longer."
    alike = ", equal layers alike" if step.origin.block else ""
    within = ", within the memory that there is" if limited else ""
    less = duration(-found.more(best))
    other = found.rows[best].signature
    return f"By itself {other} would take {less} less, but signatures are chosen together{alike}{within}."


def _runner_up(cost: Cost) -> str:
    return f"The next best, {cost.runner_up}, would take {duration(cost.extra)} longer."


def _link(move: Move, cluster: Cluster) -> str:
    """The link that a move goes over, in words."""
    if move.kind in LOCAL:
        return ""
    here, there = move.src.placement, move.dst.placement
    if here is there:
        latency, bandwidth = cluster.link(here, move.axes, WAYS.get(move.kind, "ring"))
        groups = here.groups(move.axes)
        who = f"{len(groups)} group{'s' * (len(groups) > 1)} of {len(groups[0])} ranks"
        level = max(map(cluster.level_of, groups))
    else:
        latency, bandwidth = cluster.between(here, there)
        who, level = f"{here} to {there}", cluster.level_of((*here.flat, *there.flat))
    where = "inside of hosts" if level == 0 else "between hosts"
    return f"{who} {where}, {bandwidth / 1e9:.3g} GB/s a rank, {duration(latency)} a hop"


def _rounded(value: float, digits: int = 4) -> float:
    """So many digits of a number, which is all that a page shows."""
    return float(f"{value:.{digits}g}")
