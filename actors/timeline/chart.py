"""The chart of a step: what every queue really did, and below it what was simulated, on one axis of time, as SVG.

A row is a queue of a rank; each says how much of the step it stood still.
"""

from collections.abc import Iterator
from html import escape

from ..runtime.replay import Did
from .advice import StepRecords
from .preview_chart import KINDS, SHADES

__all__ = ["chart"]

MOVES = "#c9f0e2"  # what is of no kind moves data
INK, LINE, IDLE = "#1f2328", "#7d8590", "#7d859026"
WIDE, HIGH, GAP, TOP, TICKS = 1000, 22, 4, 34, 8  # pixels, and marks of the axis
LETTER = 6.6  # pixels of a letter of 12


def chart(real: StepRecords, model: StepRecords | None, unit: float) -> str:
    """The picture; `unit` is how many seconds one unit of simulated time is."""
    parts = [(real, 1.0, "")] + ([(model, unit, "simulated ")] if model is not None else [])
    long = max((step.end - step.start) * each for step, each, _ in parts) or 1.0
    names = [_name(rank, queue, before) for step, _, before in parts for rank, queue in step.queues]
    left = round(LETTER * max(map(len, names), default=0)) + 16
    body, y = [], TOP
    for step, each, before in parts:
        title = f"{before or 'real '}{_ms((step.end - step.start) * each)}"
        body.append(f'<text x="6" y="{y + 12}" fill="{LINE}" font-weight="bold">{title}</text>')
        y += 20
        for (rank, queue), dids in step.queues.items():
            body += _row(_name(rank, queue, before), dids, step, WIDE * each / long, left, y)
            still = 1 - _busy(step, rank, queue)
            body.append(f'<text x="{left + WIDE + 8}" y="{y + 15}" fill="{LINE}">{still:.0%} idle</text>')
            y += HIGH + GAP
        y += 8
    kinds = {_kind(did) for step, _, _ in parts for dids in step.queues.values() for did in dids}
    body += [*_axis(long, left, y), *_legend(kinds, y + 26)]
    width, high = left + WIDE + 80, y + 48
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {high}" width="{width}" height="{high}" '
        f'font-family="Helvetica,Arial,sans-serif" font-size="12">'
    )
    title = f'<text x="6" y="18" fill="{LINE}" font-size="14">{escape(real.network.name)}</text>'
    return "\n".join([head, title, *body, "</svg>"])


def _name(rank: int, queue: str, before: str) -> str:
    return queue if before else f"rank {rank} {queue}"


def _kind(did: Did) -> str:
    letter = (did.ran.case or did.ran.actor)[:1]
    return letter if letter in KINDS else ""


def _fill(kind: str) -> str:
    return SHADES.get(kind, (MOVES,))[0]


def _busy(step: StepRecords, rank: int, queue: str) -> float:
    """The share of the step in which a queue works."""
    spans = step.busy(rank, queue)
    return sum(end - start for start, end in spans) / max(step.end - step.start, 1e-30)


def _row(name: str, dids: tuple[Did, ...], step: StepRecords, scale: float, left: int, y: int) -> Iterator[str]:
    yield f'<text x="6" y="{y + 15}" fill="{LINE}">{escape(name)}</text>'
    wide = (step.end - step.start) * scale
    yield f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{HIGH}" fill="{IDLE}"/>'
    for did in dids:
        x, width = left + (did.ran.start - step.start) * scale, (did.ran.end - did.ran.start) * scale
        said = " and ".join(f"{name} of micro-batch {label}" for name, label in did.ran.parts)
        label = "&".join(str(label) for _, label in did.ran.parts)
        yield (
            f"<g><title>{escape(said)}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{HIGH}" '
            f'fill="{_fill(_kind(did))}" stroke="{LINE}" stroke-width="0.5"/>'
        )
        if width > LETTER * len(label) + 2:
            yield f'<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle" fill="{INK}">{label}</text>'
        yield "</g>"


def _axis(long: float, left: int, y: int) -> Iterator[str]:
    for k in range(TICKS + 1):
        x = left + WIDE * k / TICKS
        yield f'<path d="M{x:.1f} {y}v5" stroke="{LINE}"/>'
        yield f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle" fill="{LINE}">{_ms(long * k / TICKS)}</text>'


def _legend(kinds: set[str], y: int) -> Iterator[str]:
    x = 6.0
    for kind, word in {**KINDS, "": "moves"}.items():
        if kind in kinds:
            fill = _fill(kind)
            yield f'<rect x="{x:.0f}" y="{y}" width="12" height="12" fill="{fill}" stroke="{LINE}"/>'
            yield f'<text x="{x + 17:.0f}" y="{y + 10}" fill="{LINE}">{word}</text>'
            x += 34 + LETTER * len(word)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
