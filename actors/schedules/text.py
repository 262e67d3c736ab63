"""Schedules as text, and the words of an order: F0, B0, W0 of a device's first chunk, f0 of its second, F2.0 of more.
A forward with a + runs together with the backward behind it: F3+ b1.

schedule mine          schedule twice
act p-s+1              way vee
low_b p-s              table
                       F0 f0 b0 B0
                       F0 f0 b0 B0
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...placement.errors import ScheduleError, caret
from .formula import fault, known_names

__all__ = ["Action", "Value", "ops", "read", "write"]

KINDS = "FBW"
_WORD = re.compile(r"(?:([FBW])(?:(\d+)\.)?(\d+)|([fbw])(\d+))(\+?)")
WORDS = "name", "way", "order", "first", "unpinned"  # fields that are no formulas

Value = str | int | bool | tuple[str, ...]


class Action(NamedTuple):
    """One thing to do: F, B or W of a chunk for a micro-batch. In a row of a table chunks are counted on the device."""

    kind: str
    chunk: int
    number: int
    joined: bool = False  # a forward that runs together with the backward behind it

    def __str__(self) -> str:
        kind, chunk, number, joined = self
        if chunk > 1:
            return f"{kind}{chunk}.{number}{'+' * joined}"
        return f"{kind.lower() if chunk else kind}{number}{'+' * joined}"


def ops(name: str, device: int, row: str) -> tuple[Action, ...]:
    """The words of a device's row, each once."""
    found: dict[Action, int] = {}
    together: list[bool] = []
    for word in re.finditer(r"\S+", row):
        match = _WORD.fullmatch(word[0])
        if match is None:
            what = f"{name}: device {device} has {word[0]!r}, which is no word of an order"
            raise ScheduleError(
                caret(row, word.start(), what)
                + "\n  words are F0 B0 W0 of the first chunk, f0 b0 w0 of the second, F2.0"
            )
        upper, chunk, number, lower, other, joined = match.groups()
        op = Action(upper, int(chunk or 0), int(number)) if upper else Action(lower.upper(), 1, int(other))
        if op in found:
            raise ScheduleError(
                caret(row, word.start(), f"{name}: device {device} does {op} twice") + "\n  take one of them out"
            )
        found[op] = word.start()
        together.append(bool(joined))
    listed = list(found)
    for op, after, both in zip(listed, [*listed[1:], None], together, strict=False):
        if both and (op.kind != "F" or after is None or after.kind != "B" or after[1:3] == op[1:3]):
            what = f"{name}: device {device} cannot do {op} together with {after or 'nothing'}"
            raise ScheduleError(
                caret(row, found[op], what) + "\n  a + joins a forward and the backward of another behind it: F3+ B1"
            )
    return tuple(op._replace(joined=both) for op, both in zip(listed, together, strict=True))


def read(text: str, kinds: Mapping[str, Value]) -> dict[str, Value]:
    """The fields that a text gives, of those that there are; `kinds` has a value of each field's type."""
    found: dict[str, Value] = {}
    rows: list[str] | None = None
    at = 0
    for line in text.splitlines(keepends=True):
        start, at = at + len(line) - len(line.lstrip()), at + len(line)
        words = line.partition("#")[0].split(maxsplit=1)
        if not words:
            continue
        if rows is not None:
            rows.append(" ".join(" ".join(words).split()))
            continue
        key, value = words[0], words[1].strip() if len(words) > 1 else ""
        behind = start + line.lstrip().find(value, len(key))
        if not found and key != "schedule":
            raise ScheduleError(caret(text, start, "a schedule begins with its name: schedule mine"))
        field = "name" if key == "schedule" else key
        if field not in kinds or (field == "name" and key == field):
            raise ScheduleError(caret(text, start, f"a schedule has no {key!r}") + f"\n  it has {_known(kinds)}")
        if field in found:
            raise ScheduleError(caret(text, start, f"{key} is given twice"))
        kind = kinds[field]
        if isinstance(kind, tuple):
            rows, value = [], value or " "
        if isinstance(kind, bool) != (not value):
            wants = "nothing behind it" if value else "a value behind it"
            raise ScheduleError(caret(text, behind if value else start, f"{key} has {wants}"))
        if isinstance(kind, int) and not isinstance(kind, bool) and not value.isdecimal():
            raise ScheduleError(caret(text, behind, f"{key} is a whole number"))
        wrong = fault(value) if isinstance(kind, str) and field not in WORDS else None
        if wrong is not None:
            raise ScheduleError(caret(text, behind + wrong[0], wrong[1]) + f"\n  the names are {known_names()}")
        found[field] = True if isinstance(kind, bool) else int(value) if isinstance(kind, int) else value
    if rows is not None:
        found["table"] = tuple(rows)
    if not found:
        raise ScheduleError("this text has no schedule\n  it begins with its name: schedule mine")
    return found


def write(fields: Mapping[str, Value], usual: Mapping[str, Value]) -> str:
    """The text that `read` reads: the name, and every field that is not as usual."""
    lines = [f"schedule {fields['name']}"]
    rows: Sequence[str] = ()
    for name, value in fields.items():
        if name == "name" or value == usual[name]:
            continue
        if isinstance(value, tuple):
            rows = value
        else:
            lines.append(name if value is True else f"{name} {value}")
    return "\n".join([*lines, *(["table", *rows] if rows else [])])


def _known(kinds: Mapping[str, Value]) -> str:
    return ", ".join("schedule" if name == "name" else name for name in kinds)
