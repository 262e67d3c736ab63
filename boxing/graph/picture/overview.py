"""The overview of a graph: its picture on about one screen, as deep into modules as there is room."""

from ..move_prices import MovePrices
from ..physical import Physical
from .paint import paint
from .scene import Scene, tokens

__all__ = ["SCREEN", "overview"]

SCREEN = 40  # nodes that are seen at once


def overview(graph: Physical, prices: MovePrices | None = None) -> Scene:
    """The deepest picture of at most so many nodes, or that of outermost modules."""
    deepest = max((len(tokens(step.origin.module)) for step in graph.steps), default=0)
    made = paint(graph, overview=True, prices=prices)
    for depth in range(deepest, 0, -1):
        if len(made.nodes) <= SCREEN:
            break
        made = paint(graph, depth, overview=True, prices=prices)
    return made
