"""The report: a table of rows for each published table, and what is off by how much in all."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from .asked import Answer
from .baseline import baselines
from .setting import Published

__all__ = ["report"]

Found = Sequence[tuple[Published, Answer]]


def report(tables: Mapping[str, Found]) -> Iterator[str]:
    """Lines in Markdown."""
    all_errors: list[float] = []
    all_base: list[float] = []
    summary = [
        "| table | rows | median | within 20 % | worst | one share of peak and the bubble |",
        "|---|---|---|---|---|---|",
    ]
    body: list[str] = []
    for name, found in tables.items():
        told = [(row, answer) for row, answer in found if "seconds" in answer]
        base = baselines([row for row, _ in told]) if told else []
        errors = [answer["seconds"] / row.seconds - 1 for row, answer in told]
        others = [seconds / row.seconds - 1 for seconds, (row, _) in zip(base, told, strict=True)]
        all_errors += errors
        all_base += others
        if errors:
            summary.append(f"| {name} | {len(errors)} of {len(found)} | {_figures(errors)} | {_middle(others)} |")
        body += ["", f"**{name}**", "", *_rows(found, dict(zip([id(row) for row, _ in told], base, strict=True)))]
    if all_errors:
        summary.append(f"| **all** | {len(all_errors)} | {_figures(all_errors)} | {_middle(all_base)} |")
    yield from summary
    yield from body


def _middle(errors: Sequence[float]) -> str:
    return f"{median(map(abs, errors)):.1%}"


def _figures(errors: Sequence[float]) -> str:
    near = sum(abs(error) <= 0.2 for error in errors) / len(errors)
    return f"{_middle(errors)} | {near:.0%} | {max(errors, key=abs):+.0%}"


def _rows(found: Found, base: Mapping[int, float]) -> Iterator[str]:
    yield "| row | published, s | predicted | off | baseline | memory, GB | published | assumed |"
    yield "|---|---|---|---|---|---|---|---|"
    for row, answer in found:
        held = f"{row.memory / 1e9:.1f}" if row.memory else ""
        if "seconds" not in answer:
            yield f"| {row.name} | {row.seconds:.3g} | {str(answer['error'])[:60]} | | | | {held} | {row.assumed} |"
            continue
        off, other = answer["seconds"] / row.seconds - 1, base[id(row)] / row.seconds - 1
        figures = (
            f"{row.seconds:.3g} | {answer['seconds']:.3g} | {off:+.0%} | {other:+.0%} | {answer['memory'] / 1e9:.1f}"
        )
        yield f"| {row.name} | {figures} | {held} | {row.assumed} |"
