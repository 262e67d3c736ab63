"""The two sides of a rule's arrow: patterns of factors, read from its text, and laid over the dims of a call's tensors.

`lay` decides which dims of a call are one factor; the rest of a rule, and what may be wrong with it, is read in
`rule.py`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, TypeVar

from .call import NEVER, Match

__all__ = ["MARKS", "WORD", "Dim", "Operand", "PatternReader", "Unread", "lay"]

MARKS = {"+": "sum", ":max": "max", ":min": "min", ":avg": "avg", "!": "never"}

ABSENT = (0,)  # the shape of what ATen returns for results that were not asked for

Key: TypeAlias = str | int  # a factor: its name, or for one of `...` or `*` its place, counted from the right
Sizes: TypeAlias = Sequence[int]
T = TypeVar("T")

WORD = r"[A-Za-z_]\w*"
_SPACES = " \t\n"


@dataclass(frozen=True, slots=True)
class Dim:
    """One word of a pattern: `k+`, `*[dim]!`, `...` or `1`; `at` is where it stands in the rule's text."""

    name: str  # of a factor; "*" for any number of dims; "1"
    mark: str = ""
    attr: str = ""  # the argument that names the marked dims of a "*"
    at: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """The pattern of one tensor, of each in a list (`many`), of an `addend`, or of whatever is never split (`any`)."""

    dims: tuple[Dim, ...]
    kind: str = "one"
    at: int = 0

    @property
    def rest(self) -> bool:
        """Whether it has any number of dims."""
        return any(dim.name == "*" for dim in self.dims)

    def loose(self, ndim: int) -> int:
        """The number of a tensor's dims that are not named."""
        return ndim - len(self.dims) + self.rest

    def keys(self, rest: Iterable[int]) -> list[Key]:
        """The factor of each dim, where `rest` are those of the dims that are not named."""
        places = tuple(rest)
        return [key for dim in self.dims for key in (places if dim.name == "*" else (dim.name,))]


class Unread(Exception):
    """Nothing that could follow stands at this place of a text."""

    def __init__(self, at: int) -> None:
        self.at = at


class PatternReader:
    """Reads patterns from the left; `at` is the place in the text that it has come to.

    >>> PatternReader("{... k+}").operand()
    Operand(dims=(Dim(name='*', mark='', attr='', at=1), Dim(name='k', mark='sum', attr='', at=5)), kind='many', at=1)
    """

    def __init__(self, text: str) -> None:
        self.text, self.at = text, len(text) - len(text.lstrip(_SPACES))

    def found(self, what: str) -> str | None:
        """Read what fits a regular expression, and the spaces behind it; None where nothing does."""
        match = _expression(what).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[1]

    def need(self, what: str) -> str:
        found = self.found(what)
        if found is None:
            raise Unread(self.at)
        return found

    def each(self, one: Callable[[], T], parted: str) -> tuple[T, ...]:
        """One or several, parted by what fits an expression."""
        found = [one()]
        while self.found(parted):
            found.append(one())
        return tuple(found)

    def operand(self) -> Operand:
        at = self.at
        if self.found("_"):
            return Operand((), "any", at)
        kind = {"&": "addend", "{": "many", None: "one"}[self.found("[&{]")]
        pattern = self._pattern()
        if kind == "many":
            self.need("}")
        return replace(pattern, kind=kind)

    def _pattern(self) -> Operand:
        at, dims = self.at, list[Dim]()
        if self.found(r"\("):
            self.need(r"\)")
            return Operand((), at=at)
        while (dim := self._dim()) is not None:
            dims.append(dim)
        if not dims:
            raise Unread(at)
        return Operand(tuple(dims), at=at)

    def _dim(self) -> Dim | None:
        at = self.at
        if name := self.found(r"(?!or\b)[A-Za-z][A-Za-z0-9]*"):
            return Dim(name, self._mark(), at=at)
        if self.found(r"\.\.\.|\*"):
            attr = ""
            if self.found(r"\["):
                attr = self.need(WORD)
                self.need(r"\]")
            return Dim("*", self._mark(), attr, at)
        return Dim("1", at=at) if self.found("1") else None

    def _mark(self) -> str:
        # Wide on purpose: a mark that does not exist is met later, with words that fit it.
        found = self.found(r":\w*|[+!^~?@%$/]") or ""
        return MARKS.get(found, found)


@cache
def _expression(text: str) -> re.Pattern[str]:
    return re.compile(f"({text})[{_SPACES}]*")


def lay(
    inputs: Sequence[tuple[Operand, Sizes]], outputs: Sequence[tuple[Operand, Sizes]], bound: Mapping[str, Any]
) -> Match | None:
    """Lay patterns over shapes; `bound` are the op's arguments. None where they do not fit."""
    base = max((p.loose(len(shape)) for p, shape in inputs if p.rest), default=0)
    marks = _marks([p for p, _ in (*inputs, *outputs)], base, bound)
    ins = [keys for p, shape in inputs if (keys := _in_keys(p, len(shape))) is not None]
    outs = [keys for p, shape in outputs if (keys := _out_keys(p, shape, base, marks)) is not None]
    if len(ins) < len(inputs) or len(outs) < len(outputs):
        return None
    sizes: dict[Key, int] = {}
    for keys, (_, shape) in zip(ins, inputs, strict=True):
        for key, size in zip(keys, shape, strict=True):
            if key == "1" and size != 1:
                return None
            if key in ("1", "*") or marks.get(key) == "never":
                continue
            if size != 1 and sizes.get(key, 1) not in (1, size):
                return None
            sizes[key] = size if size != 1 else sizes.get(key, 1)
    for at, (_, shape) in enumerate(outputs):
        if any(key not in marks and size != sizes.get(key, size) for key, size in zip(outs[at], shape, strict=True)):
            if tuple(shape) != ABSENT:
                return None
            outs[at] = ["*"]
    number = {key: i for i, key in enumerate(sizes)}

    def factor(key: Key, size: int) -> int:
        return number[key] if key in number and size == sizes[key] else NEVER  # of size one: broadcast

    return Match(
        tuple(tuple(map(factor, keys, shape)) for keys, (_, shape) in zip(ins, inputs, strict=True)),
        tuple(tuple(NEVER if key in marks else number.get(key, NEVER) for key in keys) for keys in outs),
        tuple(sizes.values()),
        {number[key]: mark for key, mark in marks.items() if key in number},
    )


def _marks(patterns: Sequence[Operand], base: int, bound: Mapping[str, Any]) -> dict[Key, str]:
    """The mark of every marked factor; "never" is the strongest."""
    marks: dict[Key, str] = {}
    for pattern in patterns:
        keys = pattern.keys(range(base - 1, -1, -1))
        for dim in pattern.dims:
            if not dim.mark:
                continue
            marked: Iterable[Key] = (dim.name,)
            if dim.name == "*":
                marked = _named_by(bound[dim.attr], keys) if dim.attr else range(base)
            for key in marked:
                if marks.get(key) != "never":
                    marks[key] = dim.mark
    return marks


def _named_by(dims: object, keys: Sequence[Key]) -> list[Key]:
    """The factors of the dims that an argument names: one, several, or all where it is None or empty."""
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return list(keys)
    return [keys[dim % len(keys)] for dim in dims] if keys else []  # a tensor without dims takes dim=0


def _in_keys(pattern: Operand, ndim: int) -> list[Key] | None:
    if pattern.kind == "any":
        return ["*"] * ndim  # no factor
    loose = pattern.loose(ndim)
    if loose < 0 and pattern.kind == "addend":
        return pattern.keys(())[-loose:]
    if loose < 0 or (loose and not pattern.rest):
        return None
    return pattern.keys(range(loose - 1, -1, -1))


def _out_keys(pattern: Operand, shape: Sizes, base: int, marks: Mapping[Key, str]) -> list[Key] | None:
    """Like those of an input, but the marked dims may be gone, as a reduction without keepdim has it."""
    loose = pattern.loose(len(shape))
    left = [place for place in range(base - 1, -1, -1) if place not in marks]
    if pattern.kind == "any":
        return ["*"] * len(shape)
    if loose == base * pattern.rest:
        return pattern.keys(range(base - 1, -1, -1))
    if pattern.rest and loose == len(left):
        return pattern.keys(left)
    return ["*"] if tuple(shape) == ABSENT else None
