"""The syntax of patterns of names: from a text to the regex of each name in it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import NamedTuple, TypeAlias

from ...placement.errors import SbpError, caret

__all__ = ["DIGITS", "Component", "NumberRange", "TextFault", "components"]

LETTERS = 10_000  # of a pattern
DEEP = 8  # braces in braces
LOOSE = 16  # braces in one name, and ** in a pattern: more may take long to meet nothing
DIGITS = 6  # of a number

NUMBER = r"(?:0|[1-9]\d*)"
_PLAIN = re.compile(r"[\w-]+")
_NUMBERS = re.compile(r"\[ *(?:(-?[0-9]+)|(-?[0-9]+)? *: *(-?[0-9]+)?) *\]")


class TextFault(Exception):
    """A mistake at a place of a text, which is shown with it once the text is at hand."""

    def __init__(self, at: int, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.at, self.message, self.fix = at, message, fix

    def shown(self, text: str) -> SbpError:
        return SbpError(caret(text, self.at, self.message) + (f"\n  {self.fix}" if self.fix else ""))


@dataclass(frozen=True)
class NumberRange:
    """The numbers from `start` on and before `stop`, both of which count from the end where they are negative."""

    start: int = 0
    stop: int | None = None

    @property
    def needs_count(self) -> bool:
        return self.start < 0 or (self.stop or 0) < 0

    def of(self, count: int) -> "NumberRange":
        """The same range of so many, from the beginning."""
        return NumberRange(*slice(self.start, self.stop).indices(count)[:2]) if self.needs_count else self

    def regex(self) -> str:
        below = "" if self.stop is None else rf"(?!{_from(self.stop)}(?!\d))"
        return f"{below}{_from(self.start)}"


def _from(least: int) -> str:
    """A regex of the numbers that are not less.

    >>> _from(23)
    '(?:[1-9]\\\\d{2,}|2[3-9]|[3-9]\\\\d)'
    """
    digits = str(least)
    if least <= 0:
        return NUMBER
    more = [rf"[1-9]\d{{{len(digits)},}}", f"{digits[:-1]}[{digits[-1]}-9]"]
    for at in range(len(digits) - 1):
        if digits[at] != "9":
            more.append(rf"{digits[:at]}[{int(digits[at]) + 1}-9]" + r"\d" * (len(digits) - at - 1))
    return f"(?:{'|'.join(more)})"


Component: TypeAlias = str | NumberRange  # the regex of a name, `**`, or numbers


class PatternPart(NamedTuple):
    """A part of a name as a regex; all that meet it are as long as each other if it is `fixed`."""

    regex: str
    fixed: bool = True


STAR = PatternPart("*", False)


def components(text: str, *, dots: bool) -> tuple[Component, ...]:
    """The names of a pattern; with `dots`, the parts between ranges that count from the end. Raises a `TextFault`."""
    return tuple(_PatternReader(text, dots).components())


class _PatternReader:
    """A pattern, from left to right."""

    def __init__(self, text: str, dots: bool) -> None:
        self.text, self.dots, self.at, self.loose = text, dots, 0, 0
        if len(text) > LETTERS:
            raise TextFault(0, f"a path of {len(text)} letters", f"a path has at most {LETTERS}")

    @property
    def letter(self) -> str:
        """The letter that is next; none at the end."""
        return self.text[self.at : self.at + 1]

    def components(self) -> Iterator[Component]:
        """The names between dots. A [...] may also follow without a dot, as in layers[2:8]."""
        if self.dots:
            yield from self.file_name()
            return
        before: Component = ""
        anywhere = 0
        while True:
            start, one = self.at, self.component()
            if not one == before == "**":
                yield one
                anywhere += one == "**"
            if anywhere > LOOSE:
                raise TextFault(start, f"a path with {anywhere} times **", f"there are at most {LOOSE}")
            before = one
            if not self.letter:
                return
            if self.letter == ".":
                self.at += 1
            elif self.letter != "[":
                raise self.stray()

    def component(self) -> Component:
        start, self.loose = self.at, 0
        if self.letter == "[":
            numbers = self.numbers()
            if self.letter not in ("", ".", "["):
                what = f"numbers are a name of their own, found {self.letter!r} behind them"
                raise TextFault(self.at, what, "put a dot between them")
            return numbers
        parts = self.parts(0, ".[")
        written = self.text[start : self.at]
        if not written:
            found = repr(self.letter) if self.letter else "the end"
            fix = "names stand between single dots, as in model.layers.0"
            raise TextFault(start, f"a name is missing, found {found}", fix)
        if written in ("*", "**"):
            return "[^.]+" if written == "*" else written
        if "**" in written:
            at = start + written.index("**")
            raise TextFault(at, "** stands for whole names", "put dots around it, as in h.**.weight; * is part of one")
        return _starred(parts, "[^.]*")

    def file_name(self) -> Iterator[Component]:
        """The pattern as of file names, cut where numbers count from the end."""
        held: list[PatternPart] = []
        while self.letter:
            one = self.numbers() if self.letter == "[" and _counts_numbers(self.text, self.at) else self.part(0)
            if isinstance(one, PatternPart):
                held.append(one)
            elif one.needs_count:
                yield _starred(held, ".*")
                yield one
                held = []
            else:
                held.append(self.whole(one))
        yield _starred(held, ".*")

    def whole(self, numbers: NumberRange) -> PatternPart:
        """Numbers that are a name, and not the end of one."""
        if numbers.needs_count:
            raise TextFault(self.at - 1, "a range from the end stands in {}", "let it stand between dots of its own")
        return PatternPart(rf"(?<![^.]){numbers.regex()}(?![^.])" if self.dots else numbers.regex(), False)

    def parts(self, deep: int, ends: str) -> list[PatternPart]:
        found = []
        while self.letter and self.letter not in ends:
            found.append(self.part(deep))
        return found

    def part(self, deep: int) -> PatternPart:
        plain, letter = _PLAIN.match(self.text, self.at), self.letter
        if plain is not None:
            self.at = plain.end()
            return PatternPart(re.escape(plain[0]))
        if letter == "{":
            return self.alternatives(deep + 1)
        if letter == "[" and (not self.dots or _counts_numbers(self.text, self.at)):
            return self.whole(self.numbers())
        if letter == "[":
            return self.letters()
        if letter in "}]" and not self.dots:
            raise self.stray()
        self.at += 1
        if letter == "*":
            return STAR
        if letter == "?" and self.dots:
            return PatternPart(".")
        return PatternPart("" if letter == " " and deep else re.escape(letter))

    def alternatives(self, deep: int) -> PatternPart:
        opened = self.at
        self.loose += 1
        if deep > DEEP or self.loose > LOOSE:
            what = f"braces in braces, {deep} deep" if deep > DEEP else f"a name with {self.loose} braces"
            raise TextFault(opened, what, f"there are at most {DEEP if deep > DEEP else LOOSE}")
        each = list[str]()
        while not each or self.letter == ",":
            self.at += 1
            each.append(_starred(self.parts(deep, ",}"), ".*" if self.dots else "[^.]*"))
        if not self.letter:
            raise TextFault(opened, "this { is not closed", "several names are written {a,b}")
        self.at += 1
        if each == [""]:
            raise TextFault(opened, "nothing stands in {}", "several names are written {a,b}")
        return PatternPart(f"(?:{'|'.join(each)})", False)

    def numbers(self) -> NumberRange:
        start, found = self.at, _NUMBERS.match(self.text, self.at)
        if found is None:
            word = re.match(r"\[[^\]]{0,20}\]?", self.text[start:])
            fix = "numbers 2 to 7 are written [2:8], one is [3]"
            raise TextFault(start, f"{word[0] if word else '['} is no range of numbers", fix)
        self.at = found.end()
        one, low, high = found.groups()
        long = next((bound for bound in (one, low, high) if bound and len(bound) > DIGITS), None)
        if long is not None:
            raise TextFault(start, f"a number of {len(long)} digits", f"numbers have at most {DIGITS - 1}")
        if one is not None:
            return NumberRange(int(one), int(one) + 1 or None)
        made = NumberRange(int(low or 0), int(high) if high else None)
        if made.stop is not None and (made.start < 0) == (made.stop < 0) and made.start >= made.stop:
            fix = "the end is left out: numbers 2 to 7 are [2:8]"
            raise TextFault(start, f"there are no numbers in {found[0]}", fix)
        return made

    def letters(self) -> PatternPart:
        """One letter of several, as in file names."""
        end = self.text.find("]", self.at + 2)
        if end < 0:
            self.at += 1
            return PatternPart(r"\[")
        made = translate(self.text[self.at : end + 1])
        self.at = end + 1
        return PatternPart(made[4:].rpartition(")")[0])

    def stray(self) -> TextFault:
        opens = {"}": "{", "]": "["}.get(self.letter, "")
        if opens:
            return TextFault(self.at, f"this {self.letter} closes nothing", f"put {opens} before it, or leave it out")
        return TextFault(self.at, f"{self.letter!r} cannot stand here", "put a dot before it")


def _counts_numbers(text: str, at: int) -> bool:
    """Whether brackets of a file name are numbers, and not letters of which one is meant."""
    found = _NUMBERS.match(text, at)
    return found is not None and (":" in found[0] or "-" in found[0])


def _starred(parts: Sequence[PatternPart], star: str) -> str:
    """The regex of parts with stars between them. A star before parts of a fixed length need not be tried again with
    more letters, if there is a star behind these: whatever is met then is met so too."""
    runs: list[list[PatternPart]] = [[]]
    for part in parts:
        if part is STAR:
            runs.append([])
        else:
            runs[-1].append(part)
    first, *others = ("".join(part.regex for part in run) for run in runs)
    for at, run in enumerate(others, 1):
        tried_once = at < len(others) and all(part.fixed for part in runs[at])
        first += f"(?>{star}?{run})" if tried_once else star + run
    return first
