"""What a picture of a graph shows, before it is written in any language: nodes, edges, and the words in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from ...sbp import Layout
from ..look import duration, family, volume
from ..plan import Plan
from .ledger import Way, ways_of
from .physical import Box, Graph, Op, Step

__all__ = [
    "Edge", "Node", "Scene",
    "lie", "look_of", "op_name", "shape_of", "shape_only", "some", "summed", "tip_of", "tokens", "words",
]  # fmt: skip

SHAPES = frozenset(
    {"reshape", "contiguous", "_unsafe_view", "flatten", "_reshape_alias"}
)  # beside ops that return views


@dataclass(frozen=True)
class Node:
    """One thing to draw; `look` is op, shape, input, note, module, outside, or the family of a move."""

    name: str
    lines: tuple[str, ...]
    look: str
    path: tuple[str, ...] = ()  # the modules around it, outermost first
    place: str = ""  # on which placement; "" between two
    dashed: bool = False  # a move of a gradient
    note: bool = False  # parameters, in the look of what brings their gradients together
    tip: str = ""


@dataclass(frozen=True)
class Edge:
    """From one node to another; gradients walk `back` edges, against their direction; `side` ones are short."""

    tail: str
    head: str
    text: str = ""
    back: bool = False
    side: bool = False


@dataclass
class Scene:
    """Nodes and edges in the order of the graph, and the titles of modules that are drawn as frames."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[Edge, None] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        self.nodes.setdefault(node.name, node)

    def beside(self, name: str) -> list[str]:
        """What stands at the side of a node."""
        return [edge.tail for edge in self.edges if edge.side and edge.head == name]

    def join(self, tail: str, head: str, text: str = "", *, back: bool = False, side: bool = False) -> None:
        if tail != head:
            self.edges[Edge(tail, head, text, back, side)] = None


def lie(of: Layout) -> str:
    """The signature of a tensor, without that of its gradient; on one axis without brackets."""
    text = of.with_state(of.state).lie
    return repr(of.sbp[0]) if len(of.sbp) == 1 and "[" not in text else text


def op_name(op: torch._ops.OpOverload) -> str:
    """An op as one says it, without the overload; without the namespace where that is aten."""
    namespace, _, name = op._schema.name.partition("::")
    return name if namespace == "aten" else f"{namespace}.{name}"


@cache
def tokens(module: str) -> tuple[str, ...]:
    """The levels of a module's path; a number belongs to the list before it.

    >>> tokens("encoder.blocks.3.attn")
    ('encoder', 'blocks.3', 'attn')
    """
    levels: list[str] = []
    for part in module.split(".") if module else ():
        if part.isdigit() and levels:
            levels[-1] += f".{part}"
        else:
            levels.append(part)
    return tuple(levels)


def shape_only(step: Step) -> bool:
    """Whether an op only reads its input in another shape."""
    if isinstance(step, Box):
        return False
    views = any(made.alias_info is not None and not made.alias_info.is_write for made in step.op._schema.returns)
    return views or step.op._schema.name.partition("::")[2] in SHAPES


def words(*plans: Plan, of: str = "") -> tuple[str, ...]:
    """The collectives of these plans, and what they cost together."""
    ways = dict.fromkeys(way for plan in plans for way in ways_of(plan))
    if not ways:
        kinds = dict.fromkeys(move.kind for plan in plans for move in plan.moves)
        return (of + (", ".join(kinds) or "as it lies"), "nothing sent")
    first, *rest = map(str, ways)
    cost = f"{volume(sum(p.bytes for p in plans))} a rank, {duration(sum(p.price.time for p in plans))}"
    return (of + first, *rest, cost)


def summed(plans: Sequence[Plan]) -> list[str]:
    """A line for each kind of collective in a module, the dearest first."""
    found: dict[tuple[Way, ...], list[Plan]] = {}
    for plan in plans:
        if plan.total:
            found.setdefault(ways_of(plan), []).append(plan)
    lines = []
    for ways, of in sorted(found.items(), key=lambda item: -sum(p.price.time for p in item[1])):
        cost = f"{volume(sum(p.bytes for p in of))}, {duration(sum(p.price.time for p in of))}"
        lines.append(f"{len(of)} {', '.join(map(str, ways))}: {cost}")
    return lines


def look_of(plans: Sequence[Plan]) -> str:
    """The family of what takes longest among the moves."""
    moves = [move for plan in plans for move in plan.moves]
    return family(max(moves, key=lambda move: move.price.time).kind if moves else "view")


def shape_of(of: Layout) -> str:
    return "x".join(map(str, of.shape)) or "scalar"


def some(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def tip_of(graph: Graph, steps: Sequence[Op]) -> str:
    """What a pointer shows: every op with what goes in and comes out, and the user's line."""
    lines = []
    for step in steps[:40]:
        took = ", ".join(f"{shape_of(graph.layout(n))} {lie(graph.layout(n))}" for n in step.inputs)
        made = ", ".join(f"{shape_of(y.layout)} {lie(y.layout)}" for y in step.outputs)
        lines.append(f"{step.outputs[0].name} = {op_name(step.op)}: {took} -> {made}  {step.origin.line}".rstrip())
    return "\n".join(lines)
