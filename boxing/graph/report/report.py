"""Reports: what a graph costs and why, in the shapes in which people read it."""

from ...explanation import Explanation, unsaved
from .facts import GraphFacts
from .full import full
from .map import drawn_map
from .page import page
from .summary import summary

__all__ = ["Report"]


class Report(GraphFacts, Explanation):
    """The explanation of a graph: its summary has 30 lines at most, its page the picture."""

    def __str__(self) -> str:
        return "\n".join(summary(self))

    def full(self) -> str:
        """Every rank, move and op, in tables of text."""
        return "\n".join(full(self))

    def html(self, path: None = None) -> str:
        unsaved(path)
        return page(self)

    def map(self) -> str:
        """The model on one page, as SVG: modules down, axes across, cells coloured by S, B, P; and memory by kind."""
        return drawn_map(self)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.map()
