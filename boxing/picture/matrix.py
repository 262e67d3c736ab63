"""The matrix of moves: one row a source, one column a target, as an SVG that is drawn without any program.

              to   B            S(0)
    from B         free         free
         S(0)      AG 96 KiB    free      a cell: its collectives, bytes that the busiest rank receives, times the bound

It follows the page into the dark: fills and inks of the families come twice, chosen by `prefers-color-scheme`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from ...sbp import Layout
from ..figures import volume
from ..routes.bound import lower_bound
from . import svg
from .draw import DrawnBoxing
from .palette import FAMILIES, SHORT, dark, families, family

__all__ = ["moves_matrix"]

WIDE, TALL, SIDE, HEAD, GAP, PAD = 66, 34, 60, 20, 6, 24  # pixels of a cell, a row head, a column head, and between
STYLE = (
    "text{font-size:11px}.title{font-size:15px;font-weight:600}.strong{font-weight:600}.small{font-size:9.5px}"
    ".mid{text-anchor:middle}.end{text-anchor:end}.paper{fill:#ffffff}.ink{fill:#1f2328}.pale{fill:#6e7781}"
    + dark(".paper{fill:#0d1117}.ink{fill:#e6edf3}.pale{fill:#8b949e}")
    + families(
        lambda kin, ink, fill: f".{kin}{{fill:{fill}}}.{kin}-ink,.{kin}-bar{{fill:{ink}}}.{kin}-bar{{opacity:.55}}"
    )
)
NOTE = "Below: bytes that the busiest rank receives, drawn as a bar; × how many times the lower bound, where above it."


def moves_matrix(boxings: Sequence[DrawnBoxing], title: str = "") -> str:
    """These boxings by source and target, in the order they come; a pair without a boxing stays empty."""
    sources = list(dict.fromkeys(way.src for way in boxings))
    targets = list(dict.fromkeys(way.dst for way in boxings))
    left, top = PAD + SIDE * _axes(sources), PAD + 30 + HEAD * (1 + _axes(targets))
    xs, ys = _stops(targets, left, WIDE), _stops(sources, top, TALL)
    width, height = max(xs[-1] + WIDE, 760) + PAD, ys[-1] + TALL + PAD + 44
    busiest = max(way.bytes for way in boxings)
    body = [
        svg.element("style", STYLE),
        svg.rect(0, 0, width, height, rx=10, class_="paper"),
        svg.text(PAD, PAD + 14, title, class_="ink title"),
    ]
    for axis in range(_axes(targets)):
        y = PAD + 30 + HEAD * axis + 14
        body.append(svg.text(left - 8, y, f"to {_name(targets, axis)}", class_="pale small end"))
        body += [svg.text(x, y, label, class_="ink mid") for x, label in _labels(targets, axis, xs, WIDE)]
    for axis in range(_axes(sources)):
        x = PAD + SIDE * (axis + 0.5)
        body.append(svg.text(x, top - 6, f"from {_name(sources, axis)}", class_="pale small mid"))
        body += [svg.text(x, y + 4, label, class_="ink mid") for y, label in _labels(sources, axis, ys, TALL)]
    at = (dict(zip(sources, ys, strict=True)), dict(zip(targets, xs, strict=True)))
    for way in boxings:
        body.append(_cell(way, at[1][way.dst], at[0][way.src], busiest))
    y = ys[-1] + TALL + 15
    body += svg.legend(_used(boxings), PAD, y, {"class_": "ink small"}, by="class_", size=14, letter=5.2, rx=3)
    body.append(svg.text(PAD, y + 33, NOTE, class_="pale small"))
    return svg.drawing(width, height, *body, role="img", aria_label=title) + "\n"


def collectives(boxing: DrawnBoxing) -> list[str]:
    """The kinds of a boxing's moves that send something."""
    return [move.kind for move in boxing.moves if move.kind in SHORT]


def _cell(boxing: DrawnBoxing, x: int, y: int, busiest: int) -> str:
    kinds = collectives(boxing)
    kin = list(dict.fromkeys(map(family, kinds))) or ["free"]
    stripe, middle = (WIDE - 2) / len(kin), x + WIDE // 2
    ink = f"{kin[0]}-ink" if len(kin) == 1 else "ink"
    bound = lower_bound(boxing.src, boxing.dst)
    parts = [svg.rect(x + 1 + k * stripe, y + 1, stripe, TALL - 2, class_=name) for k, name in enumerate(kin)]
    if boxing.bytes:
        over = f" ×{boxing.bytes / bound:.2g}" if bound and boxing.bytes > 1.005 * bound else ""
        parts += [
            svg.text(middle, y + 14, " ".join(SHORT[kind] for kind in kinds), class_=f"{ink} mid strong"),
            svg.text(middle, y + 26, volume(boxing.bytes) + over, class_=f"{ink} mid small"),
            svg.rect(x + 1, y + TALL - 4, (WIDE - 2) * boxing.bytes / busiest, 3, class_=f"{kin[-1]}-bar"),
        ]
    else:
        said = "free" if boxing.moves else "same"
        parts.append(svg.text(middle, y + TALL // 2 + 3, said, class_="free-ink mid small"))
    return svg.tipped(f"{boxing}; the bound is {bound:g}", *parts)


def _axes(layouts: Sequence[Layout]) -> int:
    return layouts[0].placement.ndim


def _name(layouts: Sequence[Layout], axis: int) -> str:
    names = layouts[0].placement.names
    return names[axis] if names else f"axis {axis}"


def _labels(layouts: Sequence[Layout], axis: int, stops: Sequence[int], size: int) -> Iterator[tuple[float, str]]:
    """Signatures of one axis along a side; neighbours that agree on it, and on those before, share a label."""
    for _, run in groupby(range(len(layouts)), lambda k: layouts[k].sbp[: axis + 1]):
        ks = list(run)
        yield (stops[ks[0]] + stops[ks[-1]] + size) / 2, repr(layouts[ks[0]].sbp[axis])


def _stops(layouts: Sequence[Layout], start: int, size: int) -> list[int]:
    """The begin of each row or column, with a gap where the signature of the first axis changes."""
    stops = [start]
    for before, after in pairwise(layouts):
        stops.append(stops[-1] + size + (GAP if before.sbp[0] is not after.sbp[0] and len(after.sbp) > 1 else 0))
    return stops


def _used(boxings: Sequence[DrawnBoxing]) -> Iterator[tuple[tuple[str], str]]:
    """The families of these boxings, each with its kinds, and how many boxings have them."""
    used = Counter(kind for way in boxings for kind in set(collectives(way)) or {"free"})
    for name, look in FAMILIES.items():
        kinds = [kind for kind in ("free", *look.kinds) if used[kind] and (kind != "free" or name == "free")]
        words = ", ".join(f"{SHORT.get(kind, '')} {kind} ({used[kind]})".strip() for kind in kinds)
        if words:
            yield (name,), words
