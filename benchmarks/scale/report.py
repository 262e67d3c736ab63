"""The report: a table of rows for each published table, what is off by how much in all, and a chart of each."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from .asked import Answer
from .baseline import baselines
from .chart import chart
from .pairs import APART, named, picked
from .refit import Row, left_out
from .setting import Published

__all__ = ["charts", "report"]

Found = Sequence[tuple[Published, Answer]]
PICTURES = "../pictures/scale"  # from the page


def report(tables: Mapping[str, Found]) -> Iterator[str]:
    """Lines in Markdown."""
    known, later = _of(tables, later=False), _of(tables, later=True)
    told = {name: answered for name, found in known.items() if (answered := _told(found))}
    yield from _summary(known, told)
    yield from _later(later)
    yield from _memory(known)
    yield from _picks(told)
    for name, found in known.items():
        yield from ("", f"**{name}**", "")
        if name in told:
            yield from (f"![predicted against published seconds of {name}]({PICTURES}/{name}.svg)", "")
        yield from _rows(found)
    for name, found in later.items():
        yield from ("", f"**{name}**, read later", "", *_rows(found))


def charts(tables: Mapping[str, Found]) -> dict[str, str]:
    """A chart of each table that has answers."""
    told = {name: _told(found) for name, found in _of(tables, later=False).items()}
    return {
        name: chart(name, _published(found), _seconds(found), baselines(_published(found)))
        for name, found in told.items()
        if found
    }


def _of(tables: Mapping[str, Found], *, later: bool) -> dict[str, Found]:
    """The rows of tables that were read later, or the others."""
    found = {name: [pair for pair in rows if pair[0].later == later] for name, rows in tables.items()}
    return {name: rows for name, rows in found.items() if rows}


def _told(found: Found) -> Found:
    return [(row, answer) for row, answer in found if "seconds" in answer]


def _published(found: Found) -> list[Published]:
    return [row for row, _ in found]


def _seconds(found: Found) -> list[float]:
    return [answer["seconds"] for _, answer in found]


def _errors(found: Found, seconds: Sequence[float]) -> list[float]:
    return [at / row.seconds - 1 for at, (row, _) in zip(seconds, found, strict=True)]


def _summary(tables: Mapping[str, Found], told: Mapping[str, Found]) -> Iterator[str]:
    """A line a table. Where a table was left out of a fit, the fit is to all others of its family of devices."""
    yield "| table | rows | median | within 20 % | worst | one share of peak and the bubble | fit without it | pairs |"
    yield "|---|---|---|---|---|---|---|---|"
    without = _without(told)
    errors, base, fits = list[float](), list[float](), list[float]()
    right = pairs = 0
    for name, found in told.items():
        own, others = _errors(found, _seconds(found)), _errors(found, baselines(_published(found)))
        fit = _errors(found, without[name]) if name in without else []
        good, of = named(_published(found), _seconds(found))
        errors, base, fits, right, pairs = errors + own, base + others, fits + fit, right + good, pairs + of
        count = f"{len(own)} of {len(tables[name])}"
        yield f"| {name} | {count} | {_figures(own)} | {_middle(others)} | {_middle(fit)} | {_share(good, of)} |"
    if errors:
        last = f"{_figures(errors)} | {_middle(base)} | {_middle(fits)} | {_share(right, pairs)}"
        yield f"| **all** | {len(errors)} | {last} |"


def _later(tables: Mapping[str, Found]) -> Iterator[str]:
    """A line a table of rows that were read when all constants stood."""
    columns = "rows | median | within 15 % | within 20 % | worst | memory: rows | median | most too low | most too high"
    yield from ("", f"| read later | {columns} |", "|---|---|---|---|---|---|---|---|---|---|")
    told = {name: _told(found) for name, found in tables.items()}
    told = {name: found for name, found in told.items() if found}
    every = [pair for found in told.values() for pair in found]
    for name, found in (*told.items(), *([("**all**", every)] if every else [])):
        errors = _errors(found, _seconds(found))
        yield f"| {name} | {len(errors)} | {_figures(errors, 0.15, 0.2)} | {_held_of(found) or ' | | | '} |"


def _without(told: Mapping[str, Found]) -> dict[str, list[float]]:
    """By table, the seconds of its rows by a fit to the other tables of its family."""
    families: dict[str, dict[str, list[Row]]] = {}
    for name, found in told.items():
        family = found[0][0].run.hardware.split()[0]
        families.setdefault(family, {})[name] = [(answer["parts"], row.seconds) for row, answer in found]
    return {name: seconds for tables in families.values() for name, seconds in left_out(tables).items()}


def _memory(told: Mapping[str, Found]) -> Iterator[str]:
    """A line for each table that says what the fullest card had."""
    yield from ("", "| memory of | rows | median | most too low | most too high |", "|---|---|---|---|---|")
    for name, found in told.items():
        if figures := _held_of(found):
            yield f"| {name} | {figures} |"


def _held_of(found: Found) -> str:
    """How many rows say what the fullest card had, and how far the answers are off: in the middle, below and above."""
    errors = [_held(row, answer) / row.memory - 1 for row, answer in _told(found) if row.memory]
    if not errors:
        return ""
    return f"{len(errors)} | {_middle(errors)} | {min(*errors, 0.0):+.0%} | {max(*errors, 0.0):+.0%}"


def _picks(told: Mapping[str, Found]) -> Iterator[str]:
    """A line for each table with groups of plans to pick from."""
    yield from ("", "| picks of | groups | within 5 % of the best | worst |", "|---|---|---|---|")
    for name, found in told.items():
        longer = picked(_published(found), _seconds(found))
        if longer:
            yield f"| {name} | {len(longer)} | {sum(share <= APART for share in longer)} | {max(longer):+.1%} |"


def _held(row: Published, answer: Answer) -> float:
    """Bytes of the fullest card, as the table counts them."""
    return float(answer[row.means])


def _middle(errors: Sequence[float]) -> str:
    return f"{median(map(abs, errors)):.1%}" if errors else ""


def _share(right: int, pairs: int) -> str:
    return f"{right} of {pairs}" if pairs else ""


def _figures(errors: Sequence[float], *within: float) -> str:
    """The median, the share of those within each of these, or of 20 %, and the worst."""
    near = [sum(abs(error) <= at for error in errors) / len(errors) for at in within or (0.2,)]
    return " | ".join([_middle(errors), *(f"{share:.0%}" for share in near), f"{max(errors, key=abs):+.0%}"])


def _rows(found: Found) -> Iterator[str]:
    told = _told(found)
    base = dict(zip(map(id, _published(told)), baselines(_published(told)) if told else [], strict=True))
    yield "| row | published, s | predicted | off | baseline | memory, GB | published | assumed | asked in, s |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row, answer in found:
        held = f"{row.memory / 1e9:.1f}" if row.memory else ""
        if "seconds" not in answer:
            said = str(answer["error"])[:60]
            yield f"| {row.name} | {row.seconds:.3g} | {said} | | | | {held} | {row.assumed} | |"
            continue
        off, other = answer["seconds"] / row.seconds - 1, base[id(row)] / row.seconds - 1
        figures = f"{row.seconds:.3g} | {answer['seconds']:.3g} | {off:+.0%} | {other:+.0%}"
        took = f"{answer['processor']:.0f}"
        yield f"| {row.name} | {figures} | {_held(row, answer) / 1e9:.1f} | {held} | {row.assumed} | {took} |"
