"""Reports: what a graph costs and why, in the shapes in which people read it.

print(report)              a summary, on 30 lines at most
print(report.full())       all of it in tables of text
report.dict()              the same for a program
report.html("step.html")   a page of its own, with the picture
"""

from html import escape
from pathlib import Path

from .facts import GraphFacts
from .full import full
from .map import drawn_map
from .page import page
from .summary import summary

__all__ = ["Report"]


class Report(GraphFacts):
    """The facts of a graph, to be printed and shown."""

    def __str__(self) -> str:
        return "\n".join(summary(self))

    def full(self) -> str:
        """Every rank, move and op, in tables of text."""
        return "\n".join(full(self))

    def map(self) -> str:
        """The model on one page, as SVG: modules down, axes across, cells coloured by S, B, P; and memory by kind."""
        return drawn_map(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>{self.map()}"

    def html(self, path: str | Path | None = None) -> str:
        """A page that needs nothing from elsewhere; written to the path if there is one."""
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text
