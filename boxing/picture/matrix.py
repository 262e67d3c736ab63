"""The matrix of moves: one row a source, one column a target, as an SVG that is drawn without any program.

              to   B            S(0)
    from B         free         free
         S(0)      AG 96 KiB    free      a cell: its collectives, bytes that the busiest rank receives, times the bound

It follows the page into the dark: fills and inks of the families come twice, chosen by `prefers-color-scheme`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise

from ...sbp import Layout
from ..figures import volume
from ..routes.bound import lower_bound
from .draw import DrawnPlan
from .palette import FAMILIES, SHORT, family

__all__ = ["moves_matrix"]

WIDE, TALL, SIDE, HEAD, GAP, PAD = 66, 34, 60, 20, 6, 24  # pixels of a cell, a row head, a column head, and between
PAGE = {"paper": ("#ffffff", "#0d1117"), "ink": ("#1f2328", "#e6edf3"), "pale": ("#6e7781", "#8b949e")}


def moves_matrix(plans: Sequence[DrawnPlan], title: str = "") -> str:
    """These plans by source and target, in the order they come; a pair without a plan stays empty."""
    sources = list(dict.fromkeys(way.src for way in plans))
    targets = list(dict.fromkeys(way.dst for way in plans))
    left, top = PAD + SIDE * _axes(sources), PAD + 30 + HEAD * (1 + _axes(targets))
    xs, ys = _stops(targets, left, WIDE), _stops(sources, top, TALL)
    width, height = max(xs[-1] + WIDE, 760) + PAD, ys[-1] + TALL + PAD + 44
    busiest = max(way.bytes for way in plans)
    body = [
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>',
        _text(PAD, PAD + 14, title, "ink title"),
    ]
    for axis in range(_axes(targets)):
        y = PAD + 30 + HEAD * axis + 14
        body.append(_text(left - 8, y, f"to {_name(targets, axis)}", "pale small end"))
        body += [_text(x, y, text, "ink mid") for x, text in _labels(targets, axis, xs, WIDE)]
    for axis in range(_axes(sources)):
        x = PAD + SIDE * (axis + 0.5)
        body.append(_text(x, top - 6, f"from {_name(sources, axis)}", "pale small mid"))
        body += [_text(x, y + 4, text, "ink mid") for y, text in _labels(sources, axis, ys, TALL)]
    at = (dict(zip(sources, ys, strict=True)), dict(zip(targets, xs, strict=True)))
    for way in plans:
        body += _cell(way, at[1][way.dst], at[0][way.src], busiest)
    body += _legend(plans, ys[-1] + TALL + 26)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<style>{_style()}</style>", *body, "</svg>", ""])


def collectives(plan: DrawnPlan) -> list[str]:
    """The kinds of a plan's moves that send something."""
    return [move.kind for move in plan.moves if move.kind in SHORT]


def _cell(plan: DrawnPlan, x: int, y: int, busiest: int) -> Iterator[str]:
    kinds = collectives(plan)
    kin = list(dict.fromkeys(map(family, kinds))) or ["free"]
    stripe = (WIDE - 2) / len(kin)
    ink = f"{kin[0]}-ink" if len(kin) == 1 else "ink"
    bound = lower_bound(plan.src, plan.dst)
    yield f"<g><title>{escape(f'{plan}; the bound is {bound:g}')}</title>"
    for k, name in enumerate(kin):
        at = f'x="{x + 1 + k * stripe:.1f}" y="{y + 1}"'
        yield f'<rect class="{name}" {at} width="{stripe:.1f}" height="{TALL - 2}"/>'
    if plan.bytes:
        over = f" ×{plan.bytes / bound:.2g}" if bound and plan.bytes > 1.005 * bound else ""
        yield _text(x + WIDE / 2, y + 14, " ".join(SHORT[kind] for kind in kinds), f"{ink} mid strong")
        yield _text(x + WIDE / 2, y + 26, volume(plan.bytes) + over, f"{ink} mid small")
        bar = (WIDE - 2) * plan.bytes / busiest
        yield f'<rect class="{kin[-1]}-bar" x="{x + 1}" y="{y + TALL - 4}" width="{bar:.1f}" height="3"/>'
    else:
        yield _text(x + WIDE / 2, y + TALL / 2 + 3, "free" if plan.moves else "same", "free-ink mid small")
    yield "</g>"


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
    """Where each row or column begins, with a gap where the signature of the first axis changes."""
    stops = [start]
    for before, after in pairwise(layouts):
        stops.append(stops[-1] + size + (GAP if before.sbp[0] is not after.sbp[0] and len(after.sbp) > 1 else 0))
    return stops


def _legend(plans: Sequence[DrawnPlan], y: int) -> Iterator[str]:
    x = PAD
    used = Counter(kind for way in plans for kind in set(collectives(way)) or {"free"})
    for name, look in FAMILIES.items():
        kinds = [kind for kind in ("free", *look.kinds) if used[kind] and (kind != "free" or name == "free")]
        words = ", ".join(f"{SHORT.get(kind, '')} {kind} ({used[kind]})".strip() for kind in kinds)
        if words:
            yield f'<rect class="{name}" x="{x}" y="{y - 11}" width="14" height="14" rx="3"/>'
            yield _text(x + 20, y, words, "ink small")
            x += 40 + round(5.2 * len(words))
    note = (
        "Below: bytes that the busiest rank receives, drawn as a bar; × how many times the lower bound, where above it."
    )
    yield _text(PAD, y + 22, note, "pale small")


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{look}">{escape(text)}</text>'


def _style() -> str:
    """All colours, those of the light page first."""
    plain = (
        "text{font:11px Helvetica,Arial,sans-serif}.title{font-size:15px;font-weight:600}.strong{font-weight:600}"
        ".small{font-size:9.5px}.mid{text-anchor:middle}.end{text-anchor:end}"
    )
    return f"{plain}{_colours(0)}@media (prefers-color-scheme:dark){{{_colours(1)}}}"


def _colours(night: int) -> str:
    rules = [f".{name}{{fill:{pair[night]}}}" for name, pair in PAGE.items()]
    for name, look in FAMILIES.items():
        ink, fill = ((look.ink, look.fill), (look.night_ink, look.night))[night]
        rules.append(f".{name}{{fill:{fill}}}.{name}-ink{{fill:{ink}}}.{name}-bar{{fill:{ink};fill-opacity:.55}}")
    return "".join(rules)
