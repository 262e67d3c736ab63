"""Equal ranks: those that hold as much of every tensor, so that memory is worked out for the first of them alone."""

from collections.abc import Hashable, Iterable

from ....boxing.boxing import Boxing
from ....boxing.graph.physical import Physical
from ....sbp import Layout

__all__ = ["alike", "equal_ranks"]


def equal_ranks(graph: Physical) -> list[list[int]]:
    """All ranks of a graph, in groups of equal ones."""
    layouts = dict.fromkeys(value.layout for value in graph.values.values())
    layouts |= dict.fromkeys(of for source in graph.sources for of in (source.home, source.master))
    layouts |= dict.fromkeys(layout for back in graph.backs for layout in (back.src, back.dst))
    return alike(layouts, dict.fromkeys([*map(graph.boxing, graph.boxes), *(back.boxing for back in graph.backs)]))


def alike(layouts: Iterable[Layout], ways: Iterable[Boxing]) -> list[list[int]]:
    """The ranks of these layouts in groups that hold as much of each, and see the same of it after these moves.

    Ranks are asked one by one only of what differs among them: there may be thousands.
    """
    listed = list(layouts)
    places = list(dict.fromkeys(of.placement for of in listed))
    uneven = [of for of in listed if not of.even]
    differ = [way for way in ways if _differs(way)]
    groups: dict[Hashable, list[int]] = {}
    for rank in sorted({rank for place in places for rank in place.flat}):
        there = tuple(rank in place for place in places)
        held = tuple(of.local_shape(rank) if rank in of.placement else None for of in uneven)
        seen = tuple(way.is_view(rank) for way in differ)
        groups.setdefault((there, held, seen), []).append(rank)
    return list(groups.values())


def _differs(way: Boxing) -> bool:
    """Whether some ranks may have a view after a move and others not. Where all was cut evenly in one piece, and got no
    addends, all of them have it or none."""
    if way.sends:
        return False
    stops = [way.src, *(move.dst for move in way.moves)]
    plain = all(of.even and all(f >= 0 for factors in of.state.dims for f in factors) for of in stops)
    return not plain or any(move.kind == "to_partial" for move in way.moves)
