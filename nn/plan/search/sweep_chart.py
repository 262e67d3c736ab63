"""The chart of a sweep as SVG: words a second against cards, beside as many times the first, and the share of peak."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log2

from ....boxing.figures import counted
from ....boxing.picture import svg
from ....boxing.picture.palette import IDLE, INK, LINE
from ..prediction import Prediction
from .sweep import Sweep

__all__ = ["sweep_chart"]

LEFT, WIDE, HIGH, TOP, BETWEEN = 76, 640, 200, 44, 60  # pixels
SPEED, SHARE = "#6da4f5", "#f0a45c"


def sweep_chart(of: Sweep) -> str:
    """Two panels over one axis of cards, each twice the one before; a plan that does not fit is a hollow mark."""
    found = [row.prediction for row in of.rows if row.prediction is not None]
    low, high = (min(row.cards for row in of.rows), max(row.cards for row in of.rows)) if of.rows else (1, 1)
    wide = log2(high / low) or 1.0
    xs = [LEFT + WIDE * log2(one.ranks / low) / wide for one in found]
    below, end = TOP + HIGH + BETWEEN, TOP + 2 * HIGH + BETWEEN
    body = [svg.text(6, 18, _title(of, found), fill=LINE, font_size=13)]
    body += _speeds(found, xs, f"{of.unit}/s")
    tenths = max(1, ceil(10 * max([one.utilization for one in found], default=1.0)))
    heights = [end - HIGH * 10 * one.utilization / tenths for one in found]
    lines = [(end - HIGH * k / tenths, f"{k / 10:.0%}") for k in range(tenths + 1)]
    body += _panel("share of the peak", below, lines)
    body += _line(found, xs, heights, SHARE, [f"{one.utilization:.1%} of the peak" for one in found])
    marks = [(LEFT + WIDE * log2(row.cards / low) / wide, str(row.cards)) for row in of.rows]
    body += svg.axis(marks, end)
    body.append(svg.text(LEFT + WIDE / 2, end + 34, f"{of.kind}, as many", text_anchor="middle", fill=LINE))
    words = [([SPEED], f"{of.unit}/s"), ([IDLE], "as many times the first"), ([SHARE], "share of the peak")]
    body += svg.legend(words, LEFT, end + 48, {"fill": LINE}, stroke=LINE)
    return svg.drawing(LEFT + WIDE + 40, end + 72, *body)


def _title(of: Sweep, found: Sequence[Prediction]) -> str:
    of_batch = f", a batch of {found[0].samples:,} samples" if found else ", nothing was found"
    return f"A step on {of.kind}{of_batch}{' (stopped before its end)' * of.stopped}; hollow: does not fit"


def _speeds(found: Sequence[Prediction], xs: Sequence[float], unit: str) -> Iterator[str]:
    """Words a second, each line twice the one below, and a line of as many times the first as there are cards."""
    rates = [one.tokens_per_second for one in found]
    ideal = [one.ranks / found[0].ranks * rates[0] for one in found]
    known = [rate for rate in (*rates, *ideal) if rate > 0]
    low = floor(log2(min(known, default=1.0)))
    many = max(1, floor(log2(max(known, default=1.0))) + 1 - low)

    def at(rate: float) -> float:
        return TOP + HIGH - HIGH * (log2(rate) - low if rate > 0 else 0.0) / many

    lines = [2.0 ** (low + k) for k in range(0, many + 1, -(-many // 6))]
    yield from _panel(unit, TOP, [(at(rate), counted(int(rate)) or f"{rate:g}") for rate in lines])
    if found:
        yield svg.element(
            "path", d=_path(xs, [at(rate) for rate in ideal]), stroke=LINE, stroke_dasharray="4 4", fill="none"
        )
    tips = [f"{rate:,.0f} {unit}" for rate in rates]
    yield from _line(found, xs, [at(rate) for rate in rates], SPEED, tips)


def _panel(title: str, top: float, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """The ground of a panel, with lines across at these heights."""
    yield svg.rect(LEFT, top, WIDE, HIGH, fill=IDLE)
    yield svg.text(LEFT, top - 8, title, fill=LINE, font_weight="bold")
    for y, words in marks:
        yield svg.element("path", d=f"M{LEFT} {y:.1f}h{WIDE}", stroke=LINE, stroke_width=0.25)
        yield svg.text(LEFT - 6, y + 4, words, text_anchor="end", fill=LINE, font_size=10)


def _line(
    found: Sequence[Prediction], xs: Sequence[float], ys: Sequence[float], colour: str, tips: Sequence[str]
) -> Iterator[str]:
    if found:
        yield svg.element("path", d=_path(xs, ys), stroke=colour, stroke_width=2, fill="none")
    for one, x, y, tip in zip(found, xs, ys, tips, strict=True):
        fill = colour if one.fits else "#ffffff"
        mark = svg.element("circle", cx=x, cy=y, r=4, fill=fill, stroke=INK, stroke_width=0.5)
        yield svg.tipped(f"{one.ranks}: {tip}{'' if one.fits else ', does not fit'}", mark)


def _path(xs: Sequence[float], ys: Sequence[float]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))
