"""The picture of a graph as text that Graphviz reads: frames for placements and modules, moves as chips in colours.

Everything has a class (`op`, `gather`, ...), so that a page may colour it again for a dark screen.
"""

from collections.abc import Iterator, Sequence

from ...figures import duration, volume
from ...picture.draw import quoted
from ...picture.palette import FAMILIES, FONT, INK, LINE
from ..move_prices import MovePrices
from ..physical import Op, Physical
from .legend import all_told, legend_chips
from .paint import paint
from .scene import Scene, SceneEdge, SceneNode, look_of, some, tokens

__all__ = ["SCREEN", "graph_dot", "overview"]

SCREEN = 40  # nodes that are seen at once
EM = 0.079  # inches that a character of 10 points takes at most, on average: fonts differ between machines
LISTED, ACROSS, WIDEST = 8, 4, 9.0  # moves in the legend, at most in a row of it, and inches of a row
LOOKS = {
    "op": 'fillcolor="#ffffff"',
    "shape": 'fillcolor="#f6f8fa", fontcolor="#57606a", color="#c4cad1"',
    "input": 'fillcolor="#fff3b8", color="#b08800", fontcolor="#5c4700"',
    "note": 'shape=note, style=filled, fillcolor="#f6f8fa", fontcolor="#57606a", color="#c4cad1", fontsize=9',
    "module": 'fillcolor="#ffffff", penwidth=1.6, fontsize=11, margin="0.16,0.1"',
    "outside": f'style="rounded,dashed", fontcolor="{LINE}"',
}


def graph_dot(
    graph: Physical,
    depth: int | None = None,
    focus: str | None = None,
    *,
    full: bool = True,
    prices: MovePrices | None = None,
) -> str:
    """The graph in the DOT language: every op, or with `full=False` about a screen of it.

    `depth` draws each module at that depth as one node (a number belongs to its list: `blocks.3` is one level), `focus`
    one module alone, completely and with its borders. Blocks that are alike are drawn once, from three on.
    """
    brief = not full and focus is None
    shallow = brief and depth is None
    what = overview(graph, prices) if shallow else paint(graph, depth, focus, overview=brief, prices=prices)
    places = list(dict.fromkeys(node.place for node in what.nodes.values() if node.place))
    ops = sum(isinstance(step, Op) for step in graph.steps)
    title = [f"{graph.name}{f', {focus}' if focus else ''}:  {ops} ops, {len(graph.boxes)} moves"]
    title += [f"on {places[0]}"] if len(places) == 1 else []
    if any("*" in edge.text for edge in what.edges):
        title.append("*: pieces lie in another order than usual; a pointer tells")
    levels = _levels(what)
    at = {node.name: node.place for node in what.nodes.values()}
    edges = (_edge(edge, levels, apart=_apart(at[edge.tail], at[edge.head])) for edge in what.edges if not edge.side)
    body = [
        *_frame(what, places),
        *_abreast(what, places, full=full),
        *_loose(what),
        *_legend(graph, what.prices, levels),
        *edges,
    ]
    return "\n".join([*_head(title), *body, "}", ""])


def overview(graph: Physical, prices: MovePrices | None = None) -> Scene:
    """The deepest picture of about a screen, or that of outermost modules."""
    deepest = max((len(tokens(step.origin.module)) for step in graph.steps), default=0)
    made = paint(graph, overview=True, prices=prices)
    for depth in range(deepest, 0, -1):
        if len(made.nodes) <= SCREEN:
            break
        made = paint(graph, depth, overview=True, prices=made.prices)
    return made


def _levels(what: Scene) -> dict[str, int]:
    """The number of edges between each node and the end of the graph, on the longest way."""
    below: dict[str, list[str]] = {name: [] for name in what.nodes}
    for edge in what.edges:
        if not edge.back and not edge.side:
            below[edge.tail].append(edge.head)
    levels: dict[str, int] = {}
    for start in what.nodes:
        stack, open_ = [start], set[str]()
        while stack:
            name = stack[-1]
            open_.add(name)
            left = [head for head in below[name] if head not in levels and head not in open_]
            if left:
                stack.append(left[0])
            else:
                levels[name] = max((levels.get(head, 0) + 1 for head in below[name]), default=0)
                stack.pop()
    return levels


def _head(title: Sequence[str]) -> Iterator[str]:
    yield "digraph {"
    yield "  graph [rankdir=TB, newrank=true]"  # ranks across frames, or edges between frames would go upwards
    yield f'  graph [bgcolor=transparent, pad=0.2, nodesep=0.22, ranksep=0.26, fontname="{FONT}"]'
    yield f'  graph [fontsize=14, fontcolor="{LINE}", labelloc=t, labeljust=l, label={quoted(*title, left=True)}]'
    yield f'  node [shape=box, style="rounded,filled", color="{LINE}", fillcolor="#ffffff"]'
    yield '  node [height=0.3, margin="0.12,0.05"]'
    yield f'  node [fontname="{FONT}", fontsize=10, fontcolor="{INK}"]'
    yield f'  edge [color="{LINE}", fontname="{FONT}", fontsize=9, fontcolor="{LINE}", arrowsize=0.6]'


def _apart(tail: str, head: str) -> bool:
    return bool(tail and head) and tail != head


def _abreast(what: Scene, places: Sequence[str], *, full: bool) -> Iterator[str]:
    """Placements side by side, in the order in which they first run."""
    if len(places) > 1:
        # Order among nodes in frames is not kept; points that nobody sees stand in order above them.
        tops = [next(node.name for node in what.nodes.values() if node.place == place) for place in places]
        points = [f'"abreast {k}"' for k in range(len(tops))]
        yield f"  {{ rank=same; node [style=invis, shape=point]; {' -> '.join(points)} [style=invis] }}"
        for point, top in zip(points, tops, strict=True):
            yield f"  {point} -> {quoted(top)} [style=invis, weight=10]"
        # The others begin where the first one ends, or what it hands on would have to climb.
        firsts = {node.name for node in what.nodes.values() if node.place == places[0] and not full}
        hands_on = [e.tail for e in what.edges if e.tail in firsts and e.head == tops[1] and not e.back]
        row = "; ".join(quoted(name) for name in [*hands_on[:1], *tops[1:]])
        yield f"  {{ rank=same; {row} }}"


def _frame(what: Scene, places: Sequence[str]) -> Iterator[str]:
    """The nodes of each placement with what comes in there, framed where there are several, in frames of modules."""
    several = len(places) > 1
    for k, place in enumerate(places):
        here = [node for node in what.nodes.values() if node.place == place]
        if several:
            yield f"  subgraph cluster_p{k} {{"
            look = f'style="rounded,dashed", color="{LINE}", class=place, labeljust=r, margin=14, fontsize=12'
            yield f"    graph [label={_roomy(what.titles.get(place, place))}, {look}]"
        yield from _modules(here, (), what, str(k), narrow=several)
        if several:
            yield "  }"


def _modules(
    nodes: Sequence[SceneNode], path: tuple[str, ...], what: Scene, name: str, *, narrow: bool
) -> Iterator[str]:
    """The nodes in a module, then its parts in their frames, in the order of the graph."""
    pad = "  " * (len(path) + 1)
    inner: dict[tuple[str, ...], list[SceneNode]] = {}
    for node in nodes:
        if node.path == path:
            yield pad + _node(node)
            row = [node.name, *what.beside(node.name)]
            if len(row) > 1:  # written in their own frame, or they would be drawn outside of it
                look = "[style=dotted, arrowhead=none, class=side]"
                one, more = (row[:2], row[1:]) if narrow else (row, [])  # one beside it, and others below that
                yield f"{pad}{{ rank=same; {' -> '.join(quoted(name) for name in one)} {look} }}"
                if len(more) > 1:
                    yield f"{pad}{' -> '.join(quoted(name) for name in more)} {look}"
        else:
            inner.setdefault(node.path[: len(path) + 1], []).append(node)
    for k, (below, members) in enumerate(inner.items()):
        yield f"{pad}subgraph cluster_p{name}_{k} {{"
        look = 'style="rounded,filled", fillcolor="#8c959f14", color="#8c959f66", class=frame, labeljust=r, margin=10'
        yield f"{pad}  graph [label={_roomy(what.titles[below[-1]])}, fontsize=11, {look}]"
        yield from _modules(members, below, what, f"{name}_{k}", narrow=narrow)
        yield f"{pad}}}"


def _loose(what: Scene) -> Iterator[str]:
    """Nodes that are outside stand in no frame."""
    yield from ("  " + _node(node) for node in what.nodes.values() if not node.place)


def _node(node: SceneNode) -> str:
    tip = f", tooltip={quoted(*node.tip.split(chr(10)))}" if node.tip else ""
    small = node.note or node.look == "note"
    points = 9 if small else 11 if node.look == "module" else 10
    look = f"{_look(node.look, node.dashed, node.note)}, width={_width(node.lines, points):.2f}"
    classes = " ".join([node.look, *["dashed"] * node.dashed, *["note"] * node.note])
    return f'{quoted(node.name)} [label={quoted(*node.lines)}, class="{classes}", {look}{tip}]'


def _width(lines: Sequence[str], points: int = 10) -> float:
    return EM * points / 10 * max(map(len, lines)) + 0.16


def _look(look: str, dashed: bool = False, note: bool = False) -> str:
    known = FAMILIES.get(look)
    if known is None:
        return LOOKS[look]
    if note:
        return f'{LOOKS["note"]}, style="filled,dashed", color="{known.ink}"'
    line = f'style="rounded,filled,dashed", color="{known.ink}"' if dashed else f'color="{known.fill}"'
    return f'{line}, fillcolor="{known.fill}", fontcolor="{known.ink}"'


def _edge(edge: SceneEdge, levels: dict[str, int], *, apart: bool) -> str:
    """An edge, kept straight where it goes straight on, led around what it skips over. Those between placements
    do not say what stands above what."""
    words = "xlabel" if apart else "label"  # a label would be a stop on the way, which is found beside everything
    look = [f"{words}={_roomy(*edge.text.split(chr(10)))}"] if edge.text else []
    look += [f"tooltip={quoted(*edge.tip.split(chr(10)))}"] if edge.tip else []
    if edge.back:
        look += ["dir=back", "style=dashed", "class=back"]
    if apart:
        look.append("constraint=false")
    elif not edge.back and levels[edge.tail] == levels[edge.head] + 1:
        look.append("weight=6")
    return f"  {quoted(edge.tail)} -> {quoted(edge.head)} [{', '.join(look)}]"


def _legend(graph: Physical, prices: MovePrices, levels: dict[str, int]) -> Iterator[str]:
    """All buckets of gradients and the heaviest of the other moves, each in its colour, and what all come to."""
    sent = legend_chips(graph, prices)
    if not sent:
        return
    kept = [chip for chip in sent if chip.direction == "bucket"]
    kept += [chip for chip in sent if chip.direction != "bucket"][: max(LISTED - len(kept), 1)]
    yield "  subgraph cluster_legend {"
    of_what = "one micro-batch, and those once a step" if prices.piped else "a step"
    title = f"{'all' if len(kept) == len(sent) else 'the heaviest'} moves of {of_what};  dashed: of gradients"
    yield f"    graph [label={_roomy(title)}, fontsize=11, class=legend, margin=8]"
    yield '    graph [style=rounded, color="#8c959f66"]'
    chips: list[tuple[tuple[str, ...], str]] = []
    for chip in sorted(kept, key=lambda chip: -chip.seconds):
        look, dashed = look_of([chip.boxing]), chip.direction not in ("forward", "again")
        chips.append((chip.lines, f'class="{look}{" dashed" * dashed}", {_look(look, dashed)}'))
    words = []
    for direction in ("forward", "again", "backward", "update"):
        of = [chip for chip in sent if chip.direction.replace("bucket", "backward") == direction]
        if of:
            n, size, seconds = (
                sum(part) for part in zip(*((chip.times, chip.bytes, chip.seconds) for chip in of), strict=True)
            )
            words.append(f"{direction}: {some(n, 'move')}, {volume(size)} a rank, {duration(seconds)}")
    words += [f"all: {all_told(prices)}"] if prices.hidden is not None else []
    chips.append((tuple(words), f'shape=plaintext, style=solid, fontcolor="{LINE}"'))
    width = max(_width(lines) for lines, _ in chips)
    for k, (lines, look) in enumerate(chips):
        yield f'    "legend {k}" [label={quoted(*lines, left=True)}, {look}, width={width:.2f}]'
    across = min(ACROSS, max(2, round(WIDEST / width)))
    for k in range(0, len(chips), across):
        names = [f'"legend {n}"' for n in range(k, min(k + across, len(chips)))]
        yield f"    {{ rank=same; edge [style=invis]; {' -> '.join(names)} }}"
    for k in range(across, len(chips)):
        yield f'    "legend {k - across}" -> "legend {k}" [style=invis]'
    yield "  }"
    first = max(levels, key=lambda name: levels[name])
    yield f'  "legend {(len(chips) - 1) // across * across}" -> {quoted(first)} [style=invis]'


def _roomy(*lines: str) -> str:
    """Lines with spaces around them, because other fonts may be wider than the one that Graphviz thinks of."""
    rooms = [" " * (2 + len(line) // 5) for line in lines]
    return quoted(*(room + line + room for room, line in zip(rooms, lines, strict=True)))
