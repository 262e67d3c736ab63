"""Patterns of names: one text for many modules and parameters of a model, such as `layers.[2:8].*.{up,down}.weight`.

    *        any part of one name             {a,b}    one of several, also within a name
    **       any number of names, also none   [2:8]    numbers from 2 to 7; [8:], [:4], and from the end [-2:]
                                              [3]      one number; [-1] is the last

A name here is what stands between two dots. In `flow.nn.shard` `*` is any part with its dots, as in file names, and `?`
and `[a-z]` stand for one letter.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...placement.errors import SbpError, did_you_mean
from .path_syntax import DIGITS, Component, NumberRange, TextFault, components

__all__ = ["PathPattern", "meant_path", "met"]


@dataclass(frozen=True)
class PathPattern:
    """A pattern as it is written. With `dots`, a star also stands for dots.

    >>> PathPattern.of("h.[1:3].**.{up,down}").fits("h.2.mlp.up"), PathPattern.of("h.*").fits("h.2.mlp")
    (True, False)
    """

    text: str
    dots: bool = False

    @classmethod
    def of(cls, text: str, *, dots: bool = False) -> "PathPattern":
        """A pattern, or an error that points at the place where it is none."""
        made = cls(text, dots)
        try:
            _ = made._components
        except TextFault as fault:
            raise fault.shown(text) from None
        return made

    def check(self) -> None:
        """Raise a `TextFault` where this is no pattern."""
        _ = self._components

    def fits(self, name: str, among: Iterable[str] = ()) -> bool:
        """Whether it meets a name. A range that counts from the end needs to know all names that there are."""
        return self.regex(among).fullmatch(name) is not None

    def regex(self, among: Iterable[str] = ()) -> re.Pattern[str]:
        """The regex of the names that it meets; `among` are all that there are."""
        if not any(isinstance(each, NumberRange) and each.needs_count for each in self._components):
            return self._plain
        counts = _counts(among)
        if not counts:
            raise SbpError(f"{self.text}: a range from the end needs the names that there are\n  give them by among=")
        return re.compile(_joined(self._components, counts, self.dots), re.DOTALL)

    @cached_property
    def _plain(self) -> re.Pattern[str]:
        return re.compile(_joined(self._components, {}, self.dots), re.DOTALL)

    @cached_property
    def _components(self) -> tuple[Component, ...]:
        return components(self.text, dots=self.dots)


def met(pattern: PathPattern | str, names: Collection[str], among: Iterable[str] = ()) -> list[str]:
    """The names that a pattern meets, in their order.

    A range that counts from the end counts the children that `among` and the names have: give it all modules where
    some hold no parameters.

    >>> met("h.[-2:]", ["h.0", "h.1", "h.2", "norm"])
    ['h.1', 'h.2']
    """
    found = PathPattern.of(pattern) if isinstance(pattern, str) else pattern
    fits = found.regex([*among, *names]).fullmatch
    return [name for name in names if fits(name)]


def _counts(names: Iterable[str]) -> dict[str, int]:
    """How many numbered children each path has: one more than the highest number."""
    counts: dict[str, int] = {}
    for name in dict.fromkeys(names):
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal() and len(part) <= DIGITS:
                above = ".".join(parts[:at])
                counts[above] = max(counts.get(above, 0), int(part) + 1)
    return counts


def _joined(pattern: Sequence[Component], counts: dict[str, int], dots: bool) -> str:
    """The regex of a pattern's names one after the other."""
    found = ""
    for at, each in enumerate(pattern):
        last = at == len(pattern) - 1
        if each == "**" and not dots:
            if last:
                found = found.removesuffix(r"\.") + (r"(?:\.[^.]+)*" if at else r"(?:[^.]+(?:\.[^.]+)*)?")
            else:
                found += r"(?:[^.]+\.)*"
            continue
        if isinstance(each, NumberRange) and each.needs_count:
            found = _counted(found, each, counts)
        else:
            found += each.regex() if isinstance(each, NumberRange) else each
        found += "" if last or dots else r"\."
    return found


def _counted(before: str, numbers: NumberRange, counts: dict[str, int]) -> str:
    """The regex of paths with a number behind them, which is in a range that depends on how many there are."""
    above = re.compile(before, re.DOTALL)
    ways: dict[NumberRange, list[str]] = {}
    for path, count in counts.items():
        if above.fullmatch(f"{path}." if path else "") or above.fullmatch(path):
            ways.setdefault(numbers.of(count), []).append(re.escape(path) + (r"\." if path else ""))
    each = [f"(?:{'|'.join(paths)}){where.regex()}" for where, paths in ways.items() if where.start < (where.stop or 0)]
    return f"(?:{'|'.join(each)})(?![^.])" if each else "(?!)"


def meant_path(
    asked: str, names: Iterable[str], otherwise: str = "see all names: print(flow.nn.annotations(model))"
) -> str:
    """The end of an error about a name or a pattern that meets nothing, with stars for numbers where it has some.

    >>> meant_path("h.[2:8].mpl", ["h.0.mlp", "h.1.mlp"])
    "did you mean 'h.*.mlp'?"
    """
    asked = re.sub(r"\[[-\d: ]*\]", "*", asked).replace("**", "*")
    kinds = (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names) if "*" in asked else names
    return did_you_mean(asked, dict.fromkeys(kinds), otherwise)
