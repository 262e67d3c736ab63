"""A plan: the text beside a model that says how it runs, read once, printed as it was written."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

from ....boxing.html import code
from ....placement.errors import SbpError
from .lines import Line, conflict, wrong
from .read import BYTES, read
from .statements import Statement

__all__ = ["PlanText"]

_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}  # that a file begins with


@dataclass(frozen=True)
class PlanText:
    """A plan, as it is written. Two are equal if their texts are; `name` is that of a file, for errors.

    >>> plan = PlanText.read("grid (data=2)   # two ranks\\n\\n**: data=S(0)\\n")
    >>> print(plan.without_comments(), end="")
    grid (data=2)
    **: data=S(0)
    """

    text: str
    name: str = field(default="", compare=False)
    lines: tuple[Line, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", read(self.text, self.name))

    @classmethod
    def read(cls, text: str, name: str = "") -> Self:
        """A plan from its text, or the error of the first line that is wrong."""
        return cls(text, name)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """A plan from a file, which is UTF-8."""
        name = fspath(path)
        try:
            with open(path, "rb") as file:
                data = file.read(BYTES + 1)
        except OSError as error:
            raise SbpError(f"{name}: {error.strerror or error}\n  a plan is a file of text") from None
        if len(data) > BYTES:
            raise SbpError(f"{name}: a file of more than {BYTES} bytes\n  a plan is a page of text; is it this file?")
        try:
            return cls(data.decode("utf-8"), name)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            found = _MARKS.get(data[:2]) or f"the byte 0x{data[error.start]:02x}"
            raise SbpError(
                f"{name}, line {line}: expected UTF-8 text, found {found}\n"
                f"  {line} | {_printable(data, error.start)}\n  save it as UTF-8; is it this file?"
            ) from None

    @classmethod
    def of(cls, statements: Iterable[Statement], name: str = "") -> Self:
        """The plan that has these statements, a line each."""
        return cls("".join(f"{statement}\n" for statement in statements), name)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the text to a file, which `load` reads back exactly; returns its path."""
        Path(path).write_bytes(self.text.encode("utf-8"))
        return Path(path)

    @property
    def statements(self) -> tuple[Statement, ...]:
        return tuple(line.statement for line in self.lines if line.statement is not None)

    def without_comments(self) -> Self:
        """The lines that say something, as they are written."""
        said = (line.text.partition("#")[0].removeprefix("\ufeff").strip() for line in self.lines if line.statement)
        return type(self)("".join(f"{text}\n" for text in said), self.name)

    def line(self, statement: Statement) -> Line:
        """The line of a statement; the first, where several say the same."""
        same = [line for line in self.lines if line.statement is statement]
        same = same or [line for line in self.lines if line.statement == statement]
        if not same:
            raise SbpError(f"{self.name or 'plan'}: no line says {statement}\n  take one of plan.statements")
        return same[0]

    def wrong(self, where: Statement | Line, part: str, message: str, fix: str = "") -> SbpError:
        """The error of a statement, which points at one of its parts: "path", "axis:data", "schedule" and others that
        `Line.spans` has. It is returned, for the caller to raise."""
        line = where if isinstance(where, Line) else self.line(where)
        return wrong(self.name, line, _column(line, part), message, fix)

    def conflict(
        self, a: Statement | Line, b: Statement | Line, message: str, fix: str = "", *, part: str = "statement"
    ) -> SbpError:
        """The error of two statements that do not agree, which shows both."""
        first, second = ((line, _column(line, part)) for line in map(self._line, (a, b)))
        return conflict(self.name, first, second, message, fix)

    def _line(self, where: Statement | Line) -> Line:
        return where if isinstance(where, Line) else self.line(where)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}.read({self.text!r})" if len(self.text) < 200 else f"<{kind} of {len(self.lines)} lines>"

    def _repr_html_(self) -> str:
        return code(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.text, self.name)


def _column(line: Line, part: str) -> int:
    """The column of a part of a line, or else that of its statement."""
    return line.spans.get(part, line.spans.get("statement", 0))


def _printable(data: bytes, at: int) -> str:
    """The line of a byte, as far as it is text."""
    start = data.rfind(b"\n", 0, at) + 1
    text = data[max(start, at - 40) : at + 20].split(b"\n")[0].decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
