"""Signatures in every spelling a user may type, read into one tuple with an entry an axis.

(S(0), B)    B    {"data": S(0)}    "(S(0), B)"    "{data: S(0)}"    "sbp.split(0)"
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias, cast

from ..placement import Placement
from ..placement.errors import SbpError, caret
from .signature import B, Broadcast, P, Partial, Reduction, S, Sbp, Split

__all__ = ["FREE", "PartSbp", "Pin", "SbpLike", "on_all_axes", "parse", "signature"]

SbpLike: TypeAlias = Sbp | str | Sequence[Sbp | str] | Mapping[str, Sbp | str]
PartSbp: TypeAlias = Sbp | str | Sequence[Sbp | str | None] | Mapping[str, Sbp | str | None]  # None or "?": free
FREE = (None, "?")


def signature(sbp: SbpLike, placement: Placement) -> tuple[Sbp, ...]:
    """One signature an axis of the placement, whatever spelling they came in.

    >>> from ..placement import placement
    >>> p = placement("cpu:[0-3] as (data=2, tensor=2)")
    >>> signature("(S(0), B)", p), signature({"tensor": S(1)}, p), signature(B, p)
    ((S(0), B), (B, S(1)), (B, B))
    """
    given = parse(sbp) if isinstance(sbp, str) else sbp
    if isinstance(given, Mapping):
        chosen: list[Sbp] = [B] * placement.ndim
        for name, value in given.items():
            chosen[placement.axis(name)] = _one(value)
        return tuple(chosen)
    if given is B:
        return (B,) * placement.ndim
    entries = given if isinstance(given, Sequence) else (given,)
    if len(entries) != placement.ndim:
        axes = ", ".join(placement.names or map(str, range(placement.ndim)))
        fix = ", ".join(map(repr, ([*map(_one, entries)] + [B] * placement.ndim)[: placement.ndim]))
        raise SbpError(
            f"sbp={sbp!r} has {len(entries)} entries, the placement {placement.ndim} axes\n"
            f"  {placement!r} has axes {axes}\n  give one entry an axis, as in sbp=({fix})"
        )
    return tuple(map(_one, entries))


@dataclass(frozen=True)
class Pin:
    """A signature as it was said before it is known of which placement; where an entry is None, the axis is free.

    A lone entry is meant for every axis, and axes that are not named are free.

    >>> from ..placement import placement
    >>> p = placement("cpu:[0-3] as (data=2, tensor=2)")
    >>> Pin.read({"tensor": S(-1)}).on(p, 2), Pin.read((S(0), "?")).on(p, 2), Pin.read("B").on(p, 2)
    ((None, S(1)), (S(0), None), (B, B))
    """

    entries: tuple[Sbp | None, ...]
    names: tuple[str, ...] = ()  # of the axes that the entries are about; of all in order, where there are none
    lone: bool = False
    what: str = field(default="", compare=False)  # is to lie so, for errors

    @classmethod
    def read(cls, sbp: PartSbp, what: str = "") -> "Pin":
        """A signature in any spelling."""
        given = parse(sbp) if isinstance(sbp, str) and sbp not in FREE else sbp
        if isinstance(given, Mapping):
            return cls(tuple(map(_one_or_free, given.values())), tuple(given), what=what)
        if isinstance(given, tuple | list):
            return cls(tuple(map(_one_or_free, given)), what=what)
        return cls((_one_or_free(given),), lone=True, what=what)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that are cut, as they were said."""
        return tuple(entry.dim for entry in self.entries if isinstance(entry, Split))

    def on(self, placement: Placement, ndim: int) -> tuple[Sbp | None, ...]:
        """The entry of each axis of a placement, of a tensor with so many dims."""
        found: list[Sbp | None] = [None] * placement.ndim
        if self.lone:
            found = [*self.entries] * placement.ndim
        elif self.names:
            for name, entry in zip(self.names, self.entries, strict=True):
                found[placement.axis(name)] = entry
        elif len(self.entries) != placement.ndim:
            signature([B if entry is None else entry for entry in self.entries], placement)  # which says what is wrong
        else:
            found = [*self.entries]
        return tuple(S(entry.dim % ndim) if isinstance(entry, Split) else entry for entry in found)

    def __str__(self) -> str:
        said = ["?" if entry is None else str(entry) for entry in self.entries]
        if self.lone:
            return said[0]
        if self.names:
            return f"{{{', '.join(f'{name}: {entry}' for name, entry in zip(self.names, said, strict=True))}}}"
        return f"({', '.join(said)}{',' * (len(said) == 1)})"


def _one_or_free(entry: object) -> Sbp | None:
    return None if entry in FREE else _one(entry)


def on_all_axes(sbp: SbpLike, placement: Placement) -> SbpLike:
    """A parameter's signature, where a lone entry is meant for every axis: `S(0)` cuts it over all ranks.

    >>> from ..placement import placement
    >>> p = placement("cpu:[0-3] as (data=2, tensor=2)")
    >>> on_all_axes("S(0)", p), on_all_axes((S(0), B), p), on_all_axes({"data": S(0)}, p)
    ((S(0), S(0)), (S(0), B), {'data': S(0)})
    """
    given = parse(sbp) if isinstance(sbp, str) else sbp
    return (given,) * placement.ndim if isinstance(given, Split | Broadcast | Partial) else given


def _one(entry: object) -> Sbp:
    if isinstance(entry, str):
        read = parse(entry)
        if isinstance(read, Split | Broadcast | Partial):
            return read
    elif isinstance(entry, Split | Broadcast | Partial):
        return entry
    fix = "S(0), with the dim that is split" if entry is S else "S(0), B, P, P('max') or P('min')"
    raise SbpError(f"{'S' if entry is S else repr(entry)} is no signature of an axis\n  write {fix}")


def parse(text: str) -> Sbp | tuple[Sbp, ...] | dict[str, Sbp]:
    """Read a signature's text; an error points at the place.

    >>> parse("(S(0), P(max))"), parse("{data: S(-1)}"), parse("flow.sbp.broadcast")
    ((S(0), P("max")), {'data': S(-1)}, B)
    """
    from lark import UnexpectedInput, UnexpectedToken
    from lark.exceptions import VisitError

    try:
        return _reader()(text)
    except VisitError as wrong:
        raise wrong.orig_exc from None
    except UnexpectedInput as wrong:
        ended = isinstance(wrong, UnexpectedToken) and wrong.token.type == "$END"
        at = len(text) if ended or wrong.pos_in_stream is None else wrong.pos_in_stream
        said = caret(text, at, f"cannot read the signature {text!r}")
        raise SbpError(f"{said}\n  write S(0), B, P, P(max), a tuple (S(0), B) or names {{data: S(0)}}") from None


@cache
def _reader() -> Callable[[str], Sbp | tuple[Sbp, ...] | dict[str, Sbp]]:
    from lark import Lark, Token, Transformer, v_args

    @v_args(inline=True)
    class SignatureBuilder(Transformer[Token, object]):
        """Signatures from the grammar's rules, which carry the names of these methods."""

        def split(self, dim: Token) -> Sbp:
            if len(dim) > 9:
                raise SbpError(f"a dim is a small number, found one of {len(dim)} digits")
            return S(int(dim))

        def broadcast(self) -> Sbp:
            return B

        def partial(self, reduction: str = "sum") -> Sbp:
            return P(cast(Reduction, reduction.strip("\"'")))

        def one(self, _spelling: Token, kind: Sbp) -> Sbp:
            return kind

        def named(self, name: Token, kind: Sbp) -> tuple[str, Sbp]:
            return name.strip("\"'"), kind

        def many(self, *kinds: Sbp | None) -> tuple[Sbp, ...]:
            return tuple(kind for kind in kinds if kind is not None)

        def lone(self, kind: Sbp) -> Sbp:
            return kind

        def by_name(self, *pairs: tuple[str, Sbp] | None) -> dict[str, Sbp]:
            named = [pair for pair in pairs if pair is not None]
            names = [name for name, _ in named]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise SbpError(f"the axis {twice!r} is named twice\n  give each axis one signature")
            return dict(named)

    grammar = Path(__file__).with_name("sbp.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", transformer=SignatureBuilder()).parse  # type: ignore[return-value]
