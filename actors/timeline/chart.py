"""The chart of a step as SVG, on one axis of time: what every queue really did, and below it the simulation.

A row is a queue of a rank; each says how much of the step it stood still.
"""

from ...boxing.figures import duration, on_axis
from ...boxing.picture import svg
from ...boxing.picture.palette import LINE
from ..runtime.replay import Did
from .advice import StepRecords
from .preview_chart import KINDS, SHADES

__all__ = ["chart"]

MOVES = "#c9f0e2"  # what is of no kind moves data
WIDE, HIGH, GAP, TOP, TICKS = 1000, 22, 4, 34, 8  # pixels, and marks of the axis


def chart(real: StepRecords, model: StepRecords | None, unit: float) -> str:
    """The picture; `unit` is how many seconds one unit of simulated time is."""
    parts = [(real, 1.0, "")] + ([(model, unit, "simulated ")] if model is not None else [])
    long = max((step.end - step.start) * each for step, each, _ in parts) or 1.0
    names = [_name(rank, queue, before) for step, _, before in parts for rank, queue in step.queues]
    left = svg.LETTER * max(map(len, names), default=0) + 16
    body, y = [svg.text(6, 18, real.network.name, fill=LINE, font_size=14)], TOP
    for step, each, before in parts:
        title = f"{before or 'real '}{duration((step.end - step.start) * each)}"
        body.append(svg.text(6, y + 12, title, fill=LINE, font_weight="bold"))
        y += 20
        for (rank, queue), dids in step.queues.items():
            scale = WIDE * each / long
            body += svg.row(_name(rank, queue, before), left, y, (step.end - step.start) * scale, HIGH)
            body += [_bar(did, left + (did.ran.start - step.start) * scale, y, scale) for did in dids]
            body.append(svg.text(left + WIDE + 8, y + 15, f"{1 - _busy(step, rank, queue):.0%} idle", fill=LINE))
            y += HIGH + GAP
        y += 8
    marks = on_axis([long * k / TICKS for k in range(TICKS + 1)])
    body += svg.axis(((left + WIDE * k / TICKS, words) for k, words in enumerate(marks)), y)
    kinds = {_kind(did) for step, _, _ in parts for dids in step.queues.values() for did in dids}
    known = [([_fill(kind)], word) for kind, word in {**KINDS, "": "moves"}.items() if kind in kinds]
    body += svg.legend(known, 6, y + 26, {"fill": LINE}, stroke=LINE)
    return svg.drawing(left + WIDE + 80, y + 48, *body)


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


def _bar(did: Did, x: float, y: int, scale: float) -> str:
    said = " and ".join(f"{name} of micro-batch {label}" for name, label in did.ran.parts)
    label = "&".join(str(label) for _, label in did.ran.parts)
    return svg.bar(x, y, max((did.ran.end - did.ran.start) * scale, 0.5), HIGH, said, label, _fill(_kind(did)))
