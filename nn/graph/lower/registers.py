"""Registers of a list of instructions: what each of them holds, as a value that prints as its name.

value    x          a value of the graph            saved    saved 3    what a segment keeps for its backward
d        d x        its gradient, as users leave it  stash    stash 3    what of that only the second half reads
home     home w     a source's, brought together    rest     rest 3     what the first half leaves for the second
again    w again 3  a value made or moved again     chance   chance 3   from where on random numbers were drawn
sent     x sent     as it leaves its ranks          holders  holders x  who held a maximum
come     x come     as it arrives on others         moving   moving 5   a move under way
back     d w back 0 a gradient from other ranks, to be added up
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

__all__ = ["Contents", "LocalRegister", "values_of"]

Contents: TypeAlias = Literal[
    "value", "d", "home", "again", "sent", "come", "back", "saved", "stash", "rest", "chance", "holders", "moving"
]


class LocalRegister(str):
    """A register by what is in it: of which value, and the number of a stage, a transfer or a part.

    It is its text, so that layouts are found by it and messages show it; who wants to know what it holds asks it, and
    reads no text.

    >>> d = LocalRegister("d", "x")
    >>> d, d.part(2), d.part(2).of, LocalRegister("saved", number=3)
    ('d x', 'd x #2', 'x', 'saved 3')
    """

    __slots__ = ("kind", "number", "of")
    kind: Contents
    of: str
    number: int

    def __new__(cls, kind: Contents, of: str = "", number: int = 0) -> "LocalRegister":
        made = super().__new__(cls, _text(kind, of, number))
        made.kind, made.of, made.number = kind, of, number
        return made

    @property
    def is_gradient(self) -> bool:
        return self.kind in ("d", "home")

    def part(self, number: int) -> "LocalRegister":
        """Of a gradient, the so manyth part, which has a register of its own behind the first."""
        assert self.is_gradient
        return LocalRegister(self.kind, self.of, number) if number > 1 else self


def values_of(names: Iterable[str]) -> tuple[LocalRegister, ...]:
    return tuple(LocalRegister("value", name) for name in names)


def _text(kind: Contents, of: str, number: int) -> str:
    if kind == "value":
        return of
    if kind in ("d", "home"):
        return f"{kind} {of} #{number}" if number else f"{kind} {of}"
    if kind in ("again", "back"):
        return f"{of} {kind} {number}"
    if kind in ("sent", "come"):
        return f"{of} {kind}"
    return f"{kind} {of or number}"
