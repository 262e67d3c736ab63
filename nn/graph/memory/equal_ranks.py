"""Equal ranks: those that hold as much of every tensor, so that memory is worked out for the first of them alone."""

from collections.abc import Hashable

from ....boxing.graph.physical import Physical
from ....boxing.plan import BoxingPlan
from ....boxing.routes.moves import LOCAL

__all__ = ["equal_ranks", "is_view"]


def equal_ranks(graph: Physical) -> list[list[int]]:
    """All ranks of a graph, in groups of equal ones."""
    layouts = dict.fromkeys(value.layout for value in graph.values.values())
    layouts |= dict.fromkeys(of for source in graph.sources for of in (source.home, source.master))
    layouts |= dict.fromkeys(layout for back in graph.backs for layout in (back.src, back.dst))
    ways = dict.fromkeys([*map(graph.plan, graph.boxes), *(back.plan for back in graph.backs)])
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted({rank for layout in layouts for rank in layout.placement.flat}):
        held = tuple(of.local_shape(rank) if rank in of.placement else None for of in layouts)
        seen = tuple(is_view(way, rank) for way in ways)
        groups.setdefault((held, seen), []).append(rank)
    return list(groups.values())


def is_view(way: BoxingPlan, rank: int) -> bool:
    """Whether what a rank has after a move is the memory of what it had."""
    local = all(move.kind in LOCAL for move in way.moves)
    if not (local and rank in way.src.placement and rank in way.dst.placement):
        return False
    return all(program.view for parts in way.programs(rank) for program in parts)
