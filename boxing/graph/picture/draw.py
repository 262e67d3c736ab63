"""Drawing a graph into a file, or as SVG that follows its page into the dark.

draw(graph, "step.svg")                        about a screen; blocks that are alike once
draw(graph, "step.svg", full=True)             every op
draw(graph, "step.svg", depth=1)               a node a module
draw(graph, "block.svg", focus="blocks.0")     one module, completely
"""

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ....placement.errors import MissingError
from ...picture.draw import picture
from ...picture.palette import FAMILIES, dark
from ..move_prices import MovePrices
from ..physical import Physical
from .dot import graph_dot

__all__ = ["draw", "svg"]

# Fill, line and ink of everything that has a class, on a dark page.
NIGHT = {
    "op": ("#161b22", "#6e7681", "#e6edf3"),
    "shape": ("#0d1117", "#484f58", "#9198a1"),
    "input": ("#3b2e00", "#bb8009", "#f2cc60"),
    "module": ("#161b22", "#8b949e", "#e6edf3"),
    "note": ("#0d1117", "#484f58", "#9198a1"),
}


def draw(
    graph: Physical,
    path: str | Path,
    depth: int | None = None,
    focus: str | None = None,
    *,
    full: bool = False,
    prices: MovePrices | None = None,
) -> Path:
    """Write a picture of the graph; the suffix of the path says svg, png, pdf or dot (text that Graphviz reads).

    Where nothing here can draw, the text is written beside it, and MissingError says what to install.
    """
    with graph.priced():
        text = graph_dot(graph, depth, focus, full=full, prices=prices)
    done = picture(text, path)
    if done.suffix.lower() == ".svg":
        done.write_text(_dressed(done.read_text(encoding="utf-8")), encoding="utf-8")
    return done


def svg(
    graph: Physical,
    depth: int | None = None,
    focus: str | None = None,
    *,
    full: bool = False,
    prices: MovePrices | None = None,
) -> str | None:
    """The picture as SVG text, or None where nothing here can draw."""
    with TemporaryDirectory() as folder:
        try:
            done = draw(graph, Path(folder) / "graph.svg", depth, focus, full=full, prices=prices)
            return done.read_text(encoding="utf-8")
        except MissingError:
            return None


def _dressed(image: str) -> str:
    """With colours for the dark, and what a pointer is shown in the way that every browser knows."""
    image = re.sub(
        r"<title>[^<]*</title>\s*(<g id=\"a_[^>]*><a xlink:title=\"([^\"]*)\">)", r"<title>\2</title>\n\1", image
    )
    image = re.sub(r"</?a\b[^>]*>", "", image)
    return re.sub(r"(<svg\b[^>]*>)", lambda found: f"{found[1]}\n<style>{_style()}</style>", image, count=1)


@cache
def _style() -> str:
    rules = []
    for name, (fill, line, ink) in NIGHT.items():
        rules.append(_rule(f".node.{name}", fill, line, ink))
    for name, look in FAMILIES.items():
        rules.append(_rule(f".node.{name}", look.night, look.night, look.night_ink))
        rules.append(f".node.{name}.dashed :is(path,polygon,polyline){{stroke:{look.night_ink}}}")
        rules.append(_rule(f".node.{name}.note", NIGHT["note"][0], look.night_ink, NIGHT["note"][2]))
    return dark("".join(rules))


def _rule(of: str, fill: str, line: str, ink: str) -> str:
    return f"{of} :is(path,polygon,polyline){{fill:{fill};stroke:{line}}}{of} text{{fill:{ink}}}"
