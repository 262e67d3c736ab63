"""The lines of two plans side by side: lines in both, lines in one alone, and lines that differ on one subject."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal, TypeAlias

from .plan_text import PlanText
from .statements import Statement

__all__ = ["DiffRow", "PlanDiff", "diff"]

PlanChange: TypeAlias = Literal["same", "changed", "only a", "only b"]
MARKS: dict[PlanChange, str] = {"same": " ", "changed": "~", "only a": "-", "only b": "+"}


@dataclass(frozen=True)
class DiffRow:
    """A statement of either plan, or one of each that are about the same thing."""

    a: Statement | None
    b: Statement | None

    @property
    def change(self) -> PlanChange:
        if self.a is None or self.b is None:
            return "only b" if self.a is None else "only a"
        return "same" if self.a == self.b else "changed"


@dataclass(frozen=True)
class PlanDiff:
    """Two plans side by side; prints as a table. `notes` are more columns by their titles, a text a row."""

    names: tuple[str, str]
    rows: tuple[DiffRow, ...]
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def changes(self) -> tuple[DiffRow, ...]:
        """The rows in which the two are not the same; none, if the plans say the same."""
        return tuple(row for row in self.rows if row.change != "same")

    def noted(self, title: str, texts: Sequence[str]) -> "PlanDiff":
        """The same rows with one more column, such as the bytes or the seconds of each."""
        if len(texts) != len(self.rows):
            raise ValueError(f"{len(texts)} notes for {len(self.rows)} rows")
        return PlanDiff(self.names, self.rows, {**self.notes, title: tuple(texts)})

    def dict(self) -> dict[str, Any]:
        """All of it in lists, dicts and text, as json has them."""
        rows = [{"change": row.change, "a": row.a and str(row.a), "b": row.b and str(row.b)} for row in self.rows]
        return {"names": list(self.names), "rows": rows, "notes": {title: list(of) for title, of in self.notes.items()}}

    def __str__(self) -> str:
        head = ("", *self.names, *self.notes)
        table = [
            (MARKS[row.change], *("" if each is None else str(each) for each in (row.a, row.b)), *notes)
            for row, *notes in zip(self.rows, *self.notes.values(), strict=True)
        ]
        wide = [max(len(line[column]) for line in (head, *table)) for column in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, wide, strict=True)).rstrip()
            for line in (head, *table)
        )


def diff(a: PlanText, b: PlanText) -> PlanDiff:
    """Two plans side by side. Statements are compared as values, so that comments and spaces do not count.

    >>> a = PlanText.read("grid (data=2)\\n**: data=S(0)", "a")
    >>> print(diff(a, PlanText.read("grid (data=4)\\ncast ** to bf16", "b")))
       a              b
    ~  grid (data=2)  grid (data=4)
    -  **: data=S(0)
    +                 cast ** to bf16
    """
    return PlanDiff((a.name or "a", b.name or "b"), tuple(_rows(a.statements, b.statements)))


def _rows(a: Sequence[Statement], b: Sequence[Statement]) -> Iterator[DiffRow]:
    """The statements in order. Those that are the same in both stand in one row each, and of those between two of
    these the ones that are about the same."""
    for _, start, end, first, last in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if a[start:end] == b[first:last]:
            yield from (DiffRow(one, one) for one in a[start:end])
            continue
        at = first
        for one in a[start:end]:
            other = next((k for k in range(at, last) if _same_subject(one, b[k])), None)
            if other is None:
                yield DiffRow(one, None)
                continue
            yield from (DiffRow(None, each) for each in b[at:other])
            yield DiffRow(one, b[other])
            at = other + 1
        yield from (DiffRow(None, each) for each in b[at:last])


def _same_subject(a: Statement, b: Statement) -> bool:
    """Whether two say something of the same thing, so that one is the other changed; one kind in common is enough."""
    return type(a) is type(b) and all(_meet(getattr(a, name), getattr(b, name)) for name in a.form.subject)


def _meet(a: object, b: object) -> bool:
    return not {*a}.isdisjoint(b) if isinstance(a, tuple) and isinstance(b, tuple) else a == b
