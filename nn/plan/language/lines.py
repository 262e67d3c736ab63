"""The lines of a plan, each with its number, its text and where its parts stand; and errors that show them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ....placement.errors import SbpError, caret
from .statements import Statement

__all__ = ["Line", "conflict", "wrong"]

_UNSEEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")


@dataclass(frozen=True)
class Line:
    """A physical line, without what ends it. One without a statement has a comment, or nothing.

    `spans` are the columns of parts by their names: statement, path, kind:grads, axis:data, entry:data, over, schedule.
    """

    number: int
    text: str
    statement: Statement | None = None
    spans: Mapping[str, int] = field(default_factory=dict)

    @property
    def comment(self) -> str:
        """The text behind a #, without it."""
        return self.text.partition("#")[2].strip()

    def __str__(self) -> str:
        return self.text


def wrong(name: str, line: Line, column: int, message: str, fix: str = "") -> SbpError:
    """The error of a line: the plan's name, the message, the line with a caret below, and a fix."""
    first, *more = message.split("\n")
    head = f"{name or 'plan'}, line {line.number}: {first}"
    return SbpError("\n".join([head, *_shown(line, column), *more, *(f"  {fix}" if fix else "").splitlines()]))


def conflict(name: str, a: tuple[Line, int], b: tuple[Line, int], message: str, fix: str = "") -> SbpError:
    """The error of two lines that do not agree; both are shown."""
    first, *more = message.split("\n")
    (line, _), (other, _) = sorted((a, b), key=lambda each: each[0].number)
    head = f"{name or 'plan'}, lines {line.number} and {other.number}: {first}"
    shown = [text for each, column in sorted((a, b), key=lambda each: each[0].number) for text in _shown(each, column)]
    return SbpError("\n".join([head, *shown, *more, *(f"  {fix}" if fix else "").splitlines()]))


def _shown(line: Line, column: int) -> list[str]:
    """The line with its number, and a caret. Letters that a terminal would act on are shown as a mark."""
    marked = line.text.startswith("\ufeff")  # at the start of a file
    text = _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", line.text.rstrip("\r")[marked:])
    gutter = f"  {line.number} | "
    _, cut, mark = caret(text, column - marked, "").split("\n")
    return [gutter + cut[2:], " " * (len(gutter) - 2) + mark]
