"""The chart of a table as SVG: predicted against published seconds, both by logarithms, with a band of 10 %."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10

from sbpflow.boxing.picture import svg
from sbpflow.boxing.picture.palette import IDLE, INK, LINE

from .setting import Published

__all__ = ["chart"]

LEFT, TOP, SIZE = 64, 40, 360  # pixels
BAND = 0.1
NEAR, FAR, BASE = "#6da4f5", "#f0a45c", "#9aa0a6"
MARKS = (1.0, 2.0, 5.0)


def chart(table: str, rows: Sequence[Published], seconds: Sequence[float], baseline: Sequence[float]) -> str:
    """Marks within the band in one colour, those outside of it in another, and the baseline's as small ones."""
    known = [*(row.seconds for row in rows), *seconds, *baseline]
    low, high = log10(min(known)) - 0.1, log10(max(known)) + 0.1
    scale = SIZE / (high - low)

    def x(value: float) -> float:
        return LEFT + scale * (log10(value) - low)

    def y(value: float) -> float:
        return TOP + SIZE - scale * (log10(value) - low)

    first, last = 10**low, 10**high
    corners = [(first, first * (1 + BAND)), (last / (1 + BAND), last), (last, last), (last, last * (1 - BAND))]
    corners += [(first / (1 - BAND), first), (first, first)]
    body = [
        svg.text(LEFT, 20, f"{table}: seconds of a step, predicted against published", fill=LINE, font_size=13),
        svg.rect(LEFT, TOP, SIZE, SIZE, fill=IDLE),
        svg.element("polygon", points=" ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in corners), fill="#bfe3c4"),
        svg.element("path", d=f"M{x(first):.1f} {y(first):.1f}L{x(last):.1f} {y(last):.1f}", stroke=LINE),
    ]
    ticks = [value for value in _ticks(low, high) if first <= value <= last]
    body += svg.axis([(x(value), f"{value:g}") for value in ticks], TOP + SIZE)
    body += [
        svg.text(LEFT - 6, y(value) + 4, f"{value:g}", text_anchor="end", fill=LINE, font_size=10) for value in ticks
    ]
    for row, other in zip(rows, baseline, strict=True):
        body.append(svg.element("circle", cx=x(row.seconds), cy=y(other), r=2, fill=BASE))
    for row, told in zip(rows, seconds, strict=True):
        off = told / row.seconds - 1
        colour = NEAR if abs(off) <= BAND else FAR
        mark = svg.element("circle", cx=x(row.seconds), cy=y(told), r=4, fill=colour, stroke=INK, stroke_width=0.5)
        body.append(svg.tipped(f"{row.name}: {row.seconds:.3g} s published, {told:.3g} s predicted, {off:+.0%}", mark))
    words = [([NEAR], "within 10 %"), ([FAR], "further off"), ([BASE], "the baseline")]
    body += svg.legend(words, LEFT, TOP + SIZE + 28, {"fill": LINE}, stroke=LINE, letter=6)
    return svg.drawing(LEFT + SIZE + 40, TOP + SIZE + 52, *body)


def _ticks(low: float, high: float) -> Iterator[float]:
    for power in range(floor(low), ceil(high) + 1):
        yield from (mark * 10.0**power for mark in MARKS)
