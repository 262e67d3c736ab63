"""The map of a model on one page: modules down, axes across, cells coloured by S, B and P; and memory by kind.

It is plain SVG, written without any program, and follows its page into the dark.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ....sbp import Broadcast, Partial, Sbp
from ...figures import counted, volume
from ..measures import Held
from .facts import GraphFacts, MemoryReport
from .roles import Role, together
from .summary import listed

__all__ = ["PARTS", "drawn_map"]

ROWS, RANKS = 40, 16  # of modules and of ranks, at most
CELL, HIGH, GAP, LEFT, BAR = 168, 24, 3, 16, 560  # pixels
LETTER = 6.3  # pixels of a letter of 12, on average at most
PARTS = {"parameters": "#4c8fdd", "gradients": "#e08a3c", "states": "#9a6fe0", "activations": "#3fae83"}
SPLIT = ("#cfe3ff", "#a6ccff", "#7fb3f7")  # by the dim, then the last
WHOLE, ADDENDS, NONE = "#eef1f4", "#ffd3d3", "none"
STYLE = (  # in a page rules count for all of it, so that they name the map
    "<style>.map text{fill:#1f2328}.map .pale{fill:#59636e}@media (prefers-color-scheme:dark){"
    ".map text{fill:#e6edf3}.map .pale{fill:#9198a1}.map .in{fill:#1f2328}}</style>"
)


def drawn_map(facts: GraphFacts) -> str:
    """The page as SVG."""
    groups = list(together(facts.roles))
    axes = list(dict.fromkeys(axis for role in facts.roles for axis in role.axes))
    # The largest are shown, in the order of the model.
    sized = sorted(groups, key=lambda group: -sum(role.numel * role.count for role in group))[:ROWS]
    shown = [group for group in groups if group in sized]
    names = [listed(group) for group in shown]
    wide = round(LETTER * max(map(len, ["modules", *names]), default=0)) + 110
    bars = _ranks(facts.memory)
    body = [f'<text x="{LEFT}" y="22" font-size="15">{escape(facts.graph.name)}</text>']
    y = 40
    if shown and axes:
        body += _heads(axes, wide, y)
        y += 20
        for group, name in zip(shown, names, strict=True):
            body += _row(group, name, axes, wide, y)
            y += HIGH + GAP
        if len(groups) > len(shown):
            body.append(f'<text class="pale" x="{LEFT}" y="{y + 14}">and {len(groups) - len(shown)} smaller</text>')
            y += HIGH
        body += _key(y + 8)
        y += 44
    width = LEFT * 2 + max(wide + (CELL + GAP) * len(axes), 420)
    if bars and facts.memory is not None:
        body += _memory(bars, facts.memory, y)
        y += 44 + 20 * len(bars)
        width = max(width, LEFT * 2 + BAR + 190)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="map" viewBox="0 0 {width} {y}" width="{width}" height="{y}" '
        f'font-family="Helvetica,Arial,sans-serif" font-size="12">'
    )
    return "\n".join([head, STYLE, *body, "</svg>"])


def _heads(axes: Sequence[str], wide: int, y: int) -> Iterator[str]:
    yield f'<text class="pale" x="{LEFT}" y="{y + 12}">modules</text>'
    yield f'<text class="pale" x="{LEFT + wide - 8}" y="{y + 12}" text-anchor="end">weights</text>'
    for k, axis in enumerate(axes):
        yield f'<text class="pale" x="{LEFT + wide + k * (CELL + GAP)}" y="{y + 12}">{escape(axis)}</text>'


def _row(group: Sequence[Role], name: str, axes: Sequence[str], wide: int, y: int) -> Iterator[str]:
    first = group[0]
    many = f' <tspan class="pale">x {first.count}</tspan>' if first.count > 1 else ""
    tip = ", ".join(role.module for role in group)
    yield f'<g><title>{escape(tip)}</title><text x="{LEFT}" y="{y + 16}">{escape(name)}{many}</text></g>'
    weights = counted(sum(role.numel for role in group))
    yield f'<text class="pale" x="{LEFT + wide - 8}" y="{y + 16}" text-anchor="end">{weights}</text>'
    for k, axis in enumerate(axes):
        word, x = first.on(axis), LEFT + wide + k * (CELL + GAP)
        if word:
            sbp = first.sbp[first.axes.index(axis)] if first.sbp else None
            said = word if sbp is None else f"{sbp}  {word}"
            yield (
                f'<rect x="{x}" y="{y}" width="{CELL}" height="{HIGH}" rx="4" fill="{_fill(sbp)}" stroke="#7d859066"/>'
                f'<text{"" if sbp is None else " class=" + chr(34) + "in" + chr(34)} x="{x + 8}" y="{y + 16}">'
                f"{escape(said)}</text>"
            )


def _fill(sbp: Sbp | None) -> str:
    if sbp is None:
        return NONE
    if isinstance(sbp, Broadcast):
        return WHOLE
    return ADDENDS if isinstance(sbp, Partial) else SPLIT[min(sbp.dim, len(SPLIT) - 1)]


def _key(y: int) -> Iterator[str]:
    words = ("S(0)", SPLIT[0]), ("S(1)", SPLIT[1]), ("S(2)", SPLIT[2]), ("B", WHOLE), ("P", ADDENDS)
    x = LEFT
    for word, fill in words:
        yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}" stroke="#7d859066"/>'
        yield f'<text class="pale" x="{x + 19}" y="{y + 11}">{word}</text>'
        x += 34 + round(LETTER * len(word))
    yield f'<text class="pale" x="{x}" y="{y + 11}">how the weights are kept on each axis</text>'


def _ranks(memory: MemoryReport | None) -> Mapping[str, Held]:
    """The bars by name: of each rank, or of the fullest and the emptiest where there are many."""
    if memory is None or not memory.ranks:
        return {}
    if len(memory.ranks) <= RANKS:
        return {f"rank {rank}": held for rank, held in memory.ranks.items()}
    ordered = sorted(memory.ranks.items(), key=lambda item: item[1].total)
    return {f"fullest, rank {ordered[-1][0]}": ordered[-1][1], f"emptiest, rank {ordered[0][0]}": ordered[0][1]}


def _memory(bars: Mapping[str, Held], memory: MemoryReport, y: int) -> Iterator[str]:
    """A bar in parts for each rank, against the limit or the fullest."""
    most = max(held.total for held in bars.values())
    scale = BAR / max(most, memory.limit or 0, 1)
    x = LEFT
    for part, fill in PARTS.items():
        yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}"/>'
        yield f'<text class="pale" x="{x + 19}" y="{y + 11}">{part}</text>'
        x += 34 + round(LETTER * len(part))
    limit = f"of {volume(memory.limit)} at most" if memory.limit else "memory of each rank at its peak"
    yield f'<text class="pale" x="{x}" y="{y + 11}">{limit}</text>'
    y += 24
    for name, held in bars.items():
        sizes = {part: getattr(held, part) for part in PARTS}
        shrink = held.total / (sum(sizes.values()) or 1)  # they are not all held at once
        x_at = LEFT + 100.0
        yield f'<text class="pale" x="{LEFT}" y="{y + 12}">{name}</text>'
        for part, fill in PARTS.items():
            long = sizes[part] * shrink * scale * (BAR - 100) / BAR
            tip = f"<title>{part}: {volume(sizes[part])}</title>"
            yield f'<rect x="{x_at:.1f}" y="{y}" width="{long:.1f}" height="15" fill="{fill}">{tip}</rect>'
            x_at += long
        yield f'<text x="{x_at + 8:.0f}" y="{y + 12}">{volume(held.total)}</text>'
        y += 20
    if memory.limit:
        at = LEFT + 100 + memory.limit * scale * (BAR - 100) / BAR
        yield f'<path d="M{at:.1f} {y - 20 * len(bars) - 4}V{y}" stroke="#a3191f" stroke-width="2"/>'
