"""The page of two plans side by side: figures, lines that differ, and ops that lie otherwise."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from ...figures import duration, volume
from ..physical import Op
from ..picture.scene import lie, op_name
from .facts import Cost, GraphFacts, priced_ops
from .folded_graph import FoldedGraph
from .page import pages

__all__ = ["PlanLine", "difference", "page_of_two"]

PlanLine: TypeAlias = tuple[str, str, str]  # same, changed, only a, only b; and the line of each plan


def page_of_two(names: tuple[str, str], lines: Sequence[PlanLine], a: GraphFacts, b: GraphFacts) -> str:
    """The page of two plans of one model, by the names of the plans and their lines side by side."""
    return pages(f"{names[0]} and {names[1]}", [a, b], difference(names, lines, a, b))


def difference(names: tuple[str, str], lines: Sequence[PlanLine], a: GraphFacts, b: GraphFacts) -> dict[str, Any]:
    """The differences of two plans, in lists, numbers and text."""
    ops = sorted(_ops(a, b), key=lambda row: -abs(row[-1] * row[2]))
    return {"names": list(names), "rows": list(map(list, lines)), "figures": [*_figures(a, b)], "ops": ops}


def _figures(a: GraphFacts, b: GraphFacts) -> Iterator[list[str]]:
    """Rows of a name, the figure of each, and by how much the second has more."""
    seconds = {
        "step, predicted": (a.predicted, b.predicted),
        "computing": (a.compute, b.compute),
        "moving": (a.moving, b.moving),
        "hidden": (a.hidden, b.hidden),
        "optimizer": (a.update, b.update),
    }
    for name, (one, other) in seconds.items():
        if one is not None and other is not None:
            yield [name, duration(one), duration(other), _more(one, other)]
    if a.memory is not None and b.memory is not None:
        one, other = a.memory.fullest, b.memory.fullest
        yield ["fullest rank", volume(one), volume(other), _more(one, other)]
    totals = [{(total.direction, total.route): total for total in of.totals} for of in (a, b)]
    for key in dict.fromkeys((*totals[0], *totals[1])):
        first, second = (of.get(key) for of in totals)
        told = [f"{volume(t.bytes)} in {t.count}, {duration(t.seconds)}" if t else "none" for t in (first, second)]
        change = _more(first.seconds if first else 0.0, second.seconds if second else 0.0)
        yield [f"{key[0]} {key[1]}", *told, change]


def _more(one: float, other: float) -> str:
    """By how much the second is more.

    >>> _more(2.0, 3.0), _more(2.0, 2.0), _more(0.0, 1.0), _more(1.0, 0.0)
    ('+50%', 'same', 'new', 'gone')
    """
    if not one or not other:
        return "same" if one == other else "new" if other else "gone"
    share = other / one - 1
    return f"{share:+.0%}" if abs(share) >= 0.005 else "same"


def _ops(a: GraphFacts, b: GraphFacts) -> Iterator[list[Any]]:
    """Ops of both that lie otherwise, equal layers once: module, op, how many, the node of each, the signature of each,
    and by how many seconds the second takes longer."""
    rows: dict[tuple[Any, ...], list[Any]] = {}
    nodes, other = FoldedGraph(a.graph).node_of, FoldedGraph(b.graph)
    theirs = {op.outputs[0].name: (op, cost) for op, cost in priced_ops(b.graph, b.costs)}
    for op, cost in priced_ops(a.graph, a.costs):
        name = op.outputs[0].name
        found, there = theirs.get(name, (None, None))
        if found is None or found.op is not op.op:
            continue
        said = _signature(a, op), _signature(b, found)
        if said[0] == said[1]:
            continue
        key = nodes.get(name), other.node_of.get(name)
        if key in rows:
            rows[key][2] += 1
            continue
        rows[key] = [op.origin.module, op_name(op.op), 1, *key, *said, _seconds(there) - _seconds(cost)]
    yield from rows.values()


def _seconds(cost: Cost | None) -> float:
    return 0.0 if cost is None else cost.seconds


def _signature(of: GraphFacts, op: Op) -> str:
    ins = ", ".join(_lie(of, name) for name in op.inputs)
    return f"{ins} → {', '.join(dict.fromkeys(_lie(of, y.name) for y in op.outputs))}"


def _lie(of: GraphFacts, name: str) -> str:
    return lie(of.graph.layout(name))
