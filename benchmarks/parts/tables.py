"""Tables of times for docs/evidence/benchmarks.md: medians, ratios beside an aim, and the place of a report there."""

import statistics
from collections.abc import Sequence
from pathlib import Path

__all__ = ["judged", "ms", "put", "ratio"]

DOCS = Path(__file__).resolve().parent.parent.parent / "docs" / "evidence" / "benchmarks.md"


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ratios within a round."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def ms(us: Sequence[float]) -> str:
    return f"{statistics.median(us) / 1e3:.2f}"


def judged(value: float, aim: float | None) -> list[str]:
    return [f"{value:.2f}", "" if aim is None else f"{aim:.2f}", "" if aim is None else "yes" if value <= aim else "no"]


def put(name: str, report: str) -> None:
    """Put a report between its markers in the docs."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = DOCS.read_text(encoding="utf-8")
    if not (begin in text and end in text):
        raise ValueError(f"{DOCS} has no place for {name}")
    head, _, rest = text.partition(begin)
    DOCS.write_text(f"{head}{begin}\n{report}\n{end}{rest.partition(end)[2]}", encoding="utf-8")
