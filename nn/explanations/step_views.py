"""Views of the step that ran last, in words and pictures: its plan and reasons, its actors, what ran when."""

from pathlib import Path

from ...actors.timeline.diagram import drawn
from ...actors.timeline.timeline import Timeline
from ...boxing.graph.picture.draw import draw, svg
from ...boxing.graph.report.report import Report
from ...boxing.picture.draw import picture, written
from ..graph.views import PlannedViews
from .step_report import explained
from .step_timeline import timeline

__all__ = ["StepViews"]


class StepViews(PlannedViews):
    """Answers of a graph to who reads its steps."""

    def draw(self, path: str | Path, *, depth: int | None = None, focus: str | None = None, full: bool = False) -> Path:
        """Write the boxing graph as a picture; the suffix says svg, png, pdf or dot.

        It is about one screen, with equal layers drawn once; `depth=1` has a node a module, `focus="blocks.0"` one
        module completely, and `full=True` every op.
        """
        prices = explained(self.planned, idle=False).prices
        return draw(self.physical, path, depth, focus, full=full, prices=prices)

    def draw_map(self, path: str | Path) -> Path:
        """Write the model on one page: modules down, axes across, cells coloured by S, B and P; and memory by kind."""
        return written(self.explain().map(), path)

    def draw_actors(self, path: str | Path) -> Path:
        """Write the actors of a pipelined step as a picture: queues, registers and their marks."""
        return picture(drawn(self._pieces("without actors").proved.network), path)

    def timeline(self, path: str | Path | None = None) -> Timeline | None:
        """The timeline of the last step, on every rank and queue: print its `.text()` or `.summary()`.

        With a path it is also drawn beside the simulation (.svg), or saved for ui.perfetto.dev (.json). With several
        processes all of them ask, and the first rank gets it.
        """
        made = timeline(self._pieces("which has no timeline").program)
        if made is not None and path is not None:
            (made.save if Path(path).suffix == ".json" else made.draw)(path)
        return made

    def explain(self) -> Report:
        """The plan and its reasons: signatures, moves, memory, the next best. Print it, or `.save(path)`."""
        return explained(self.planned)

    def _repr_svg_(self) -> str | None:
        last = self._last
        return None if last is None else svg(last.graph, prices=explained(last, idle=False).prices)
