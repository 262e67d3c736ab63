"""The map of a model on one page: modules down, axes across, cells coloured by S, B, P; and memory by kind.

It is plain SVG, written without any program, and follows its page into the dark.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ....sbp import Broadcast, Partial, Sbp
from ...figures import counted, volume
from ...picture import svg
from ...picture.palette import dark
from ..measures import Held
from .facts import GraphFacts, MemoryReport
from .roles import Role, together
from .summary import listed

__all__ = ["PARTS", "drawn_map"]

ROWS, RANKS = 40, 16  # modules and ranks, at most
CELL, HIGH, GAP, LEFT, BAR = 168, 24, 3, 16, 560  # pixels
LETTER = 6.3  # pixels of a letter of 12, on average at most
PARTS = {"parameters": "#4c8fdd", "gradients": "#e08a3c", "states": "#9a6fe0", "activations": "#3fae83"}
SPLIT = ("#cfe3ff", "#a6ccff", "#7fb3f7")  # by the dim, then the last
WHOLE, ADDENDS, NONE = "#eef1f4", "#ffd3d3", "none"
KEPT = {**{f"S({dim})": fill for dim, fill in enumerate(SPLIT)}, "B": WHOLE, "P": ADDENDS}
EDGE = "#7d859066"
STYLE = (  # in a page rules count for all of it, so that they name the map
    ".map text{fill:#1f2328}.map .pale{fill:#59636e}"
    + dark(".map text{fill:#e6edf3}.map .pale{fill:#9198a1}.map .in{fill:#1f2328}")
)


def drawn_map(facts: GraphFacts, *, memory: bool = True) -> str:
    """The page as SVG, with or without the memory of ranks."""
    groups = list(together(facts.roles))
    axes = list(dict.fromkeys(axis for role in facts.roles for axis in role.axes))
    # The largest are shown, in the order of the model.
    sized = sorted(groups, key=lambda group: -sum(role.numel * role.count for role in group))[:ROWS]
    shown = [group for group in groups if group in sized]
    names = [listed(group) for group in shown]
    wide = round(LETTER * max(map(len, ["modules", *names]), default=0)) + 110
    bars = _ranks(facts.memory) if memory else {}
    body = [svg.element("style", STYLE), svg.text(LEFT, 22, facts.graph.name, font_size=15)]
    y = 40
    if shown and axes:
        body += _heads(axes, wide, y)
        y += 20
        for group, name in zip(shown, names, strict=True):
            body += _row(group, name, axes, wide, y)
            y += HIGH + GAP
        if len(groups) > len(shown):
            body.append(_pale(LEFT, y + 14, f"and {len(groups) - len(shown)} smaller"))
            y += HIGH
        body += _key(KEPT, "how the weights are kept on each axis", y + 8, stroke=EDGE)
        y += 44
    width = LEFT * 2 + max(wide + (CELL + GAP) * len(axes), 420)
    if bars and facts.memory is not None:
        body += _memory(bars, facts.memory, y)
        y += 44 + 20 * len(bars)
        width = max(width, LEFT * 2 + BAR + 190)
    return svg.drawing(width, y, *body, class_="map")


def _pale(x: float, y: float, words: str, **look: str | float) -> str:
    return svg.text(x, y, words, class_="pale", **look)


def _heads(axes: Sequence[str], wide: int, y: int) -> Iterator[str]:
    yield _pale(LEFT, y + 12, "modules")
    yield _pale(LEFT + wide - 8, y + 12, "weights", text_anchor="end")
    yield from (_pale(LEFT + wide + k * (CELL + GAP), y + 12, axis) for k, axis in enumerate(axes))


def _row(group: Sequence[Role], name: str, axes: Sequence[str], wide: int, y: int) -> Iterator[str]:
    first = group[0]
    many = " " + svg.element("tspan", f"x {first.count}", class_="pale") if first.count > 1 else ""
    named = svg.element("text", escape(name) + many, x=LEFT, y=y + 16)
    yield svg.tipped(", ".join(role.module for role in group), named)
    weights = counted(sum(role.numel for role in group))
    yield _pale(LEFT + wide - 8, y + 16, weights, text_anchor="end")
    for k, axis in enumerate(axes):
        word, x = first.on(axis), LEFT + wide + k * (CELL + GAP)
        if word:
            sbp = first.sbp[first.axes.index(axis)] if first.sbp else None
            yield svg.rect(x, y, CELL, HIGH, rx=4, fill=_fill(sbp), stroke=EDGE)
            said, look = (word, {}) if sbp is None else (f"{sbp}  {word}", {"class_": "in"})
            yield svg.text(x + 8, y + 16, said, **look)


def _fill(sbp: Sbp | None) -> str:
    if sbp is None:
        return NONE
    if isinstance(sbp, Broadcast):
        return WHOLE
    return ADDENDS if isinstance(sbp, Partial) else SPLIT[min(sbp.dim, len(SPLIT) - 1)]


def _key(fills: Mapping[str, str], behind: str, y: int, **look: str) -> Iterator[str]:
    entries = [*(([fill], word) for word, fill in fills.items()), ([], behind)]
    return svg.legend(entries, LEFT, y, {"class_": "pale"}, size=14, letter=LETTER, rx=3, **look)


def _ranks(memory: MemoryReport | None) -> Mapping[str, Held]:
    """The bars by name: one for each rank, or for the fullest and the emptiest where there are many."""
    if memory is None or not memory.ranks:
        return {}
    if len(memory.ranks) <= RANKS:
        return {f"rank {rank}": held for rank, held in memory.ranks.items()}
    ordered = sorted(memory.ranks.items(), key=lambda item: item[1].total)
    return {f"fullest, rank {ordered[-1][0]}": ordered[-1][1], f"emptiest, rank {ordered[0][0]}": ordered[0][1]}


def _memory(bars: Mapping[str, Held], memory: MemoryReport, y: int) -> Iterator[str]:
    """A bar in parts for each rank, against the limit or the fullest."""
    most = max(held.total for held in bars.values())
    scale, left = (BAR - 100) / max(most, memory.limit or 0, 1), LEFT + 100
    limit = f"of {volume(memory.limit)} at most" if memory.limit else "memory of each rank at its peak"
    yield from _key(PARTS, limit, y)
    y += 24
    for name, held in bars.items():
        x = float(left)
        yield _pale(LEFT, y + 12, name)
        for part, share in held.shares.items():
            yield svg.rect(x, y, share * scale, 15, f"{part}: {volume(getattr(held, part))}", fill=PARTS[part])
            x += share * scale
        yield svg.text(round(x + 8), y + 12, volume(held.total))
        y += 20
    if memory.limit:
        way = f"M{left + memory.limit * scale:.1f} {y - 20 * len(bars) - 4}V{y}"
        yield svg.element("path", d=way, stroke="#a3191f", stroke_width=2)
