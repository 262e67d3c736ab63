"""Registers, which instructions read and write, and transfers, the moves that they make.

A register is a value that says what it holds, and prints as its name:

value    x          a value of the graph            saved    saved 3    what a segment keeps for its backward
d        d x        its gradient, as users leave it  stash    stash 3    what of that only the second half reads
home     home w     a source's, brought together    rest     rest 3     what the first half leaves for the second
again    w again 3  a value made or moved again     chance   chance 3   from where on random numbers were drawn
sent     x sent     as it leaves its ranks          holders  holders x  who held a maximum
come     x come     as it arrives on others         moving   moving 5   a move under way
away     x away     as it lies on the host          landed   x landed 0 as it came back from there
code     x code 0   as bytes that hop               coming   x coming 0 the same under way
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from ....boxing.boxing import Boxing, between
from ....boxing.encoding import Encoding, MoveEncoder, encoded_boxings
from ....boxing.exchange.execute import exchanges
from ....boxing.exchange.filled_rows import filled_exchanges
from ....placement.world import owned
from ....sbp import Layout

__all__ = ["Contents", "LocalRegister", "Transfer", "values_of"]

Contents: TypeAlias = Literal[
    "value", "d", "home", "again", "sent", "come", "saved", "stash", "rest", "chance", "holders", "moving",
    "away", "coming", "landed", "code",
]  # fmt: skip


class LocalRegister(str):
    """A register, named by its contents: their kind, the value, and the number of a stage, a transfer or a part.

    It is its text, so that layouts are found by it and messages show it. Code that needs to know the contents asks for
    `kind`, `of` and `number`, and reads no text.

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

    def __getnewargs__(self) -> tuple[Contents, str, int]:  # type: ignore[override]
        return self.kind, self.of, self.number

    @property
    def is_gradient(self) -> bool:
        return self.kind in ("d", "home")

    def part(self, number: int) -> "LocalRegister":
        """The register of the so manyth part of a gradient; the first part is in this one."""
        assert self.is_gradient
        return LocalRegister(self.kind, self.of, number) if number > 1 else self


def values_of(names: Iterable[str]) -> tuple[LocalRegister, ...]:
    return tuple(LocalRegister("value", name) for name in names)


def _text(kind: Contents, of: str, number: int) -> str:
    if kind == "value":
        return of
    if kind in ("d", "home"):
        return f"{kind} {of} #{number}" if number else f"{kind} {of}"
    if kind in ("again", "coming", "landed", "code"):
        return f"{of} {kind} {number}"
    if kind in ("sent", "come", "away"):
        return f"{of} {kind}"
    return f"{kind} {of or number}"


@dataclass(frozen=True)
class Transfer:
    """A move of one tensor, or of the gradients of one bucket, each from one layout to another.

    A maximum's gradient goes back to who held it: its move `saves` what that takes, and the way back is `saved`. Sums
    may have `encodings`, one each, and a hop an `encoder`.
    """

    pairs: tuple[tuple[Layout, Layout], ...]
    saves: bool = False
    saved: bool = False
    encodings: tuple[Encoding, ...] = ()
    encoder: MoveEncoder | None = None

    @property
    def plans(self) -> tuple[Boxing, ...]:
        if self.encodings:
            return encoded_boxings(self.pairs, self.encodings)
        return tuple(between(src, dst) for src, dst in self.pairs)

    @property
    def here(self) -> bool:
        """Whether this process takes part in it."""
        return any(owned(of.placement) for of in self.pairs[0])

    @property
    def at_once(self) -> bool:
        """Whether it is made in one go, because it is more than an exchange: of a maximum, or encoded.

        In a pair of tasks filled rows go on all the same, exchange by exchange."""
        return self.saves or self.saved or self.encoder is not None

    @property
    def filled(self) -> bool:
        """Whether it is a move of values, of whose rows only those that hold something go."""
        return self.encoder is not None and self.encoder.expected(*self.pairs[0]) is not None

    @property
    def together(self) -> bool:
        """Whether it is a bucket, and not a plain move."""
        return len(self.pairs) > 1 or bool(self.encodings)

    def is_cut_off(self, register: LocalRegister) -> bool:
        """Whether it takes a piece of a whole gradient, which gets memory of its own so that the rest can go."""
        (src, dst), *more = self.pairs
        return register.kind == "home" and not (more or self.sends) and src.state.split < dst.state.split

    @cached_property
    def exchanges(self) -> int:
        """The number of exchanges that it waits for, one behind the other, while other work can go on.

        A maximum has none, because its gradient needs it in one go."""
        if self.saves or self.saved or not self.sends:
            return 0
        if self.filled:
            return filled_exchanges(between(*self.pairs[0]))
        return 1 if self.together else exchanges(self.plans[0]) if self.encoder is None else 0

    @cached_property
    def sends(self) -> bool:
        """Whether anything goes from rank to rank."""
        return any(way.sends for way in self.plans)

    @cached_property
    def pays(self) -> bool:
        """Whether somebody else than who computes carries it.

        With four ranks of one host on its two cores, starting it earlier took 1.1 to 2 times as long.
        """
        ways = self.plans
        return any(way.cluster.beside((way.src.placement.type, way.dst.placement.type), way.ranks) for way in ways)
