"""Ask our own path the published steps.

    python -m benchmarks.scale [--quick] [--only TABLE ...] [--row TEXT] [--jobs N] [--known] [--write]

Each row is a process; answers are kept in the folder of temporary files, by the row and all of our code.
"""

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.parts.command import command_line

from .asked import LONGEST, Answer, asked, known
from .report import charts, report
from .rows import TABLES, rows
from .setting import Published

DOCS = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "scale.md"
PICTURES = DOCS.parents[1] / "pictures" / "scale"
BEGIN, END = "<!-- scale:begin -->", "<!-- scale:end -->"
FEW = 3  # rows of a table that are asked by --quick
SAMPLE = 20  # rows of a table of hundreds: every so many-th


def main() -> None:
    parser = command_line(__doc__, TABLES)
    parser.add_argument("--row", default="", help="those alone whose names have this in them")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--known", action="store_true", help="nothing is asked that was not asked before")
    parser.add_argument("--longest", type=float, default=LONGEST, help="seconds of the clock for a row")
    options = parser.parse_args()
    found: dict[str, list[Future[tuple[Published, Answer]]]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for table in options.only:
            chosen = _chosen(table, options.row, quick=options.quick)
            found[table] = [
                pool.submit(_remembered, row) if options.known else pool.submit(asked, row, number, options.longest)
                for number, row in chosen
            ]
        tables: dict[str, list[tuple[Published, Answer]]] = {}
        for table, waiting in found.items():
            tables[table] = []
            for job in waiting:
                tables[table].append(job.result())
                _told(*tables[table][-1])
    answered = {table: told for table, told in tables.items() if any("seconds" in answer for _, answer in told)}
    lines = "\n".join(report(answered))
    print(lines)
    if options.write:
        _put(lines)
        for table, picture in charts(answered).items():
            PICTURES.mkdir(parents=True, exist_ok=True)
            (PICTURES / f"{table}.svg").write_text(picture + "\n", encoding="utf-8")


def _remembered(row: Published) -> tuple[Published, Answer]:
    return known(row) or (row, {"error": "not asked of this code yet"})


def _chosen(table: str, text: str, *, quick: bool) -> list[tuple[int, Published]]:
    """The rows of a table that are asked, by their numbers. Of one of hundreds as many again are as good as read later:
    nobody looked at them."""
    listed = [(number, row) for number, row in enumerate(rows(table)) if text in row.name]
    if quick:
        known = [(number, row) for number, row in listed if not row.later]
        return known[:: max(1, len(known) // FEW)][:FEW]
    if len(listed) <= 5 * SAMPLE:
        return listed
    step = len(listed) // SAMPLE
    return listed[::step] + [(number, replace(row, later=True)) for number, row in listed[step // 2 :: step]]


def _told(row: Published, answer: Answer) -> None:
    said = f"{answer['seconds'] / row.seconds - 1:+.0%}, {answer['processor']:.0f} s" if "seconds" in answer else answer
    print(f"{row.table} {row.name}: {said}", file=sys.stderr, flush=True)


def _put(lines: str) -> None:
    """Put the tables between their markers in the docs."""
    text = DOCS.read_text(encoding="utf-8")
    head, found, rest = text.partition(BEGIN)
    if not found or END not in rest:
        raise ValueError(f"{DOCS} has no place for the tables")
    DOCS.write_text(f"{head}{BEGIN}\n{lines}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
