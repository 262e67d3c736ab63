"""The command line that benchmarks in processes share, and the end of their reports."""

import argparse
from collections.abc import Iterable

from benchmarks.parts.tables import put

__all__ = ["command_line", "reported"]


def command_line(doc: str | None, parts: Iterable[str] = ()) -> argparse.ArgumentParser:
    """The options of all: which parts, how long, whether into the docs, and the job of a process that was started."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--quick", action="store_true", help="few rounds: whether all runs, not how fast")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/evidence/benchmarks.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


def reported(name: str, lines: Iterable[str], *, write: bool) -> None:
    """Print a report, and put it into the docs."""
    report = "\n".join(lines)
    print(report)
    if write:
        put(name, report)
