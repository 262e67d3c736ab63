"""Reports: what a graph costs and why, in the shapes in which people read it."""

from collections.abc import Iterator

from ...explanation import Explanation, unsaved
from ...figures import duration, user_path, volume
from .facts import GraphFacts, MemoryReport
from .lines import headline, table, table_of_moves, time_line
from .map import drawn_map
from .page import page
from .summary import summary

__all__ = ["Report"]

SHOWN = 24  # moves in the tables of text


class Report(GraphFacts, Explanation):
    """The explanation of a graph: its summary has 30 lines at most, its page the picture."""

    def __str__(self) -> str:
        return "\n".join(summary(self))

    def full(self) -> str:
        """Every rank, move and op, in tables of text."""
        return "\n".join(_full(self))

    def html(self, path: None = None) -> str:
        unsaved(path)
        return page(self)

    def map(self) -> str:
        """The model on one page, as SVG: modules down, axes across, cells coloured by S, B, P; and memory by kind."""
        return drawn_map(self)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.map()


def _full(facts: GraphFacts) -> Iterator[str]:
    yield headline(facts)
    yield f"  time    {time_line(facts)}"
    yield f"  choice  {facts.solution or 'unknown'}"
    yield from ([f"  devices {facts.devices}"] if facts.devices else ())
    yield from ([f"  links   {facts.links}"] if facts.links else ())
    yield ""
    yield from _memory(facts.memory)
    yield from ([f"frozen: {facts.frozen}"] if facts.frozen else ())
    yield from ([f"CUDA graph: {facts.recorded}"] if facts.recorded else ())
    yield from (f"eager: {line}" for line in facts.eager)
    yield from (f"idle: {line}" for line in facts.idle)
    sent = [row for row in facts.moves if not row.free]
    free = sum(row.count for row in facts.moves if row.free)
    yield ""
    yield f"moves, the heaviest first{f' ({free} more send nothing)' if free else ''}"
    yield from table_of_moves(sent[:SHOWN])
    if len(sent) > SHOWN:
        left = sum(r.spent for r in sent[SHOWN:])
        yield f"  and {len(sent) - SHOWN} more of {duration(left)}"
    yield ""
    yield "totals"
    of = [(duration(t.seconds), volume(t.bytes), f"x {t.count}", t.direction, t.route) for t in facts.totals]
    yield from table(("time", "a rank", "", "", "route"), of, "rr")
    yield ""
    yield "ops"
    yield from _ops(facts)


def _memory(memory: MemoryReport | None) -> Iterator[str]:
    if memory is None:
        yield "memory: unknown"
        return
    full = memory.limit or memory.fullest or 1
    yield f"memory of a rank{f', of {volume(memory.limit)}' if memory.limit else ''}"
    rows = []
    for rank, held in memory.ranks.items():
        bar = "#" * min(24, round(24 * held.total / full))
        over = "  too much" if memory.limit and held.total > memory.limit else ""
        parts = map(volume, (held.parameters, held.gradients, held.states, held.activations, held.total))
        beside = [volume(size) if size else "" for size in (held.host, held.disk)]
        rows.append((str(rank), *parts, f"[{bar:<24}] {held.total / full:.0%}{over}", *beside))
    kinds = ("parameters", "gradients", "states", "activations", "at most")
    yield from table(("rank", *kinds, "", "host", "disk"), rows, "rrrrrr")
    yield from filter(None, [memory.doubt])


def _ops(facts: GraphFacts) -> Iterator[str]:
    rows = []
    for row in facts.ops:
        cost = "?" if row.seconds is None else duration(row.seconds * row.count)
        other = f"{row.runner_up} (+{duration(row.extra)})" if row.runner_up else ""
        many = f"x {row.count}" if row.count > 1 else ""
        rows.append((cost, many, row.module, row.op, row.signature, other, user_path(row.line)))
    yield from table(("time", "", "module", "op", "signature", "runner-up", "line"), rows, "r")
