"""The scene of a picture, before it is written in any language: nodes, edges, and the words in them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from ....sbp import Layout
from ....sbp.traits import traits
from ...boxing import Boxing
from ...figures import duration, user_path, volume
from ...picture.palette import family
from ..move_prices import MovePart, MovePrices
from ..move_table import CollectiveKind, ways_of
from ..physical import Box, GraphStep, Op, Physical

__all__ = [
    "SceneEdge", "SceneNode", "Scene",
    "brief", "counted", "lie", "look_of", "numbered", "op_name", "shape_of", "shape_only", "some", "summed", "tip_of",
    "tokens", "words",
]  # fmt: skip

WIDE = 30  # characters on a line of a node that lists ops


@dataclass(frozen=True)
class SceneNode:
    """One thing to draw; `look` is op, shape, input, note, module, outside, or the family of a move."""

    name: str
    lines: tuple[str, ...]
    look: str
    path: tuple[str, ...] = ()  # the modules around it, outermost first
    place: str = ""  # on which placement; "" between two
    dashed: bool = False  # a move of a gradient
    note: bool = False  # parameters, in the look of what brings their gradients together
    tip: str = ""
    parts: tuple[MovePart, ...] = ()  # the moves that it tells of


@dataclass(frozen=True)
class SceneEdge:
    """From one node to another; gradients walk `back` edges, against their direction; `side` ones are short."""

    tail: str
    head: str
    text: str = ""
    back: bool = False
    side: bool = False
    tip: str = ""


@dataclass
class Scene:
    """Nodes and edges in the order of the graph, the titles of modules that are drawn as frames, and what moves cost.

    `ways` are the edges in the making: tail, head, back and side of each, with its texts and tips.
    """

    prices: MovePrices
    nodes: dict[str, SceneNode] = field(default_factory=dict)
    ways: dict[tuple[str, str, bool, bool], tuple[dict[str, None], dict[str, None]]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    def add(self, node: SceneNode) -> None:
        self.nodes.setdefault(node.name, node)

    def beside(self, name: str) -> list[str]:
        """The nodes and edges at the side of a node."""
        return [tail for tail, head, _, side in self.ways if side and head == name]

    @property
    def edges(self) -> list[SceneEdge]:
        """One edge between two nodes; it says all that goes along it, each once."""
        return [
            SceneEdge(tail, head, "\n".join(texts), back, side, "\n".join(tips))
            for (tail, head, back, side), (texts, tips) in self.ways.items()
        ]

    def join(
        self, tail: str, head: str, text: str = "", *, back: bool = False, side: bool = False, tip: str = ""
    ) -> None:
        if tail != head:
            texts, tips = self.ways.setdefault((tail, head, back, side), ({}, {}))
            texts.update({text: None} if text else {})
            tips.update({tip: None} if tip else {})


def lie(of: Layout) -> str:
    """The signature of a tensor, without that of its gradient; on one axis without brackets."""
    text = of.with_state(of.state).lie
    return repr(of.sbp[0]) if len(of.sbp) == 1 and "[" not in text else text


def brief(of: Layout) -> str:
    """The signature; for what stands behind it in brackets, a star."""
    first, more, _ = lie(of).partition(" [")
    return f"{first}{'*' * bool(more)}"


def counted(names: Sequence[str], title: str = "") -> tuple[str, ...]:
    """The words in a node of these ops: each name once, a few on a line.

    >>> counted(["view", "mul", "view", "cat"], "attn: ")
    ('attn: view x 2', 'mul', 'cat')
    """
    known = [f"{name} x {n}" if (n := names.count(name)) > 1 else name for name in dict.fromkeys(names)]
    if len(known) <= 3:
        return title + known[0], *known[1:]
    lines = [title + known[0]]
    for name in known[1:]:
        if len(lines[-1]) + len(name) > WIDE:
            lines[-1] += ","
            lines.append(name)
        else:
            lines[-1] += f", {name}"
    return tuple(lines)


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


def shape_only(step: GraphStep) -> bool:
    """Whether an op only reads its input in another shape."""
    if isinstance(step, Box):
        return False
    views = any(made.alias_info is not None and not made.alias_info.is_write for made in step.op._schema.returns)
    name = op_name(step.op)
    return views or name == "contiguous" or "reshaped" in traits(name)


def words(*parts: MovePart, of: str = "") -> tuple[str, ...]:
    """The collectives of these moves, and what they cost together."""
    ways = dict.fromkeys(way for part in parts for way in ways_of(part.boxing))
    if not ways:
        kinds = dict.fromkeys(move.kind for part in parts for move in part.boxing.moves)
        return (of + (", ".join(kinds) or "as it lies"), "nothing sent")
    first, *rest = map(str, ways)
    cost = f"{volume(sum(p.bytes for p in parts))} a rank, {duration(sum(p.seconds for p in parts))}"
    return (of + first, *rest, cost)


def summed(parts: Sequence[MovePart]) -> list[str]:
    """A line for each kind of collective in a module, the dearest first."""
    found: dict[tuple[CollectiveKind, ...], list[MovePart]] = {}
    for part in parts:
        if part.boxing.total:
            found.setdefault(ways_of(part.boxing), []).append(part)
    lines = []
    for ways, of in sorted(found.items(), key=lambda item: -sum(p.seconds for p in item[1])):
        cost = f"{volume(sum(p.bytes for p in of))}, {duration(sum(p.seconds for p in of))}"
        lines.append(f"{len(of)} {', '.join(map(str, ways))}: {cost}")
    return lines


def look_of(of: Sequence[Boxing | MovePart]) -> str:
    """The family of what takes longest among the moves."""
    boxings = [each.boxing if isinstance(each, MovePart) else each for each in of]
    moves = [move for boxing in boxings for move in boxing.moves]
    return family(max(moves, key=lambda move: move.price.time).kind if moves else "view")


def shape_of(of: Layout) -> str:
    return "x".join(map(str, of.shape)) or "scalar"


def some(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Things that have numbers, in order.

    >>> numbered("bucket", [3]), numbered("bucket", [3, 5]), numbered("bucket", [3, 4, 5, 6]), numbered("x", [0, 2, 4])
    ('bucket 3', 'buckets 3, 5', 'buckets 3 to 6', 'xs 0, ..., 4')
    """
    first, last, many = numbers[0], numbers[-1], len(numbers)
    if many < 3:
        return f"{what}{'s' * (many > 1)} {', '.join(map(str, numbers))}"
    return f"{what}s {first}{' to ' if last - first == many - 1 else ', ..., '}{last}"


def tip_of(graph: Physical, steps: Sequence[Op]) -> str:
    """The tip that a pointer shows: every op with its inputs, its outputs and the user's line."""
    lines = []
    for step in steps[:40]:
        took = ", ".join(f"{shape_of(graph.layout(n))} {lie(graph.layout(n))}" for n in step.inputs)
        made = ", ".join(f"{shape_of(y.layout)} {lie(y.layout)}" for y in step.outputs)
        lines.append(
            f"{step.outputs[0].name} = {op_name(step.op)}: {took} -> {made}  {user_path(step.origin.line)}".rstrip()
        )
    return "\n".join(lines)
