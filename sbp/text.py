"""Signatures in every spelling a user may type, read into one tuple with an entry an axis.

(S(0), B)    B    {"data": S(0)}    "(S(0), B)"    "{data: S(0)}"    "sbp.split(0)"
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..placement import Placement
from ..placement.errors import SbpError, caret
from .signature import B, Broadcast, P, Partial, S, Sbp, Split

if TYPE_CHECKING:
    from lark import Lark, Token, Tree

__all__ = ["SbpLike", "parse", "signature"]

SbpLike: TypeAlias = Sbp | str | Sequence[Sbp | str] | Mapping[str, Sbp | str]


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
    entries = (given,) if isinstance(given, Split | Broadcast | Partial) else given
    if not isinstance(entries, Sequence):
        raise SbpError(f"{sbp!r} is no signature; write S(0), B, P, a tuple of them or text like '(S(0), B)'")
    if len(entries) != placement.ndim:
        axes = placement.names or tuple(range(placement.ndim))
        fix = ", ".join(map(repr, ([*map(_one, entries)] + [B] * placement.ndim)[: placement.ndim]))
        raise SbpError(
            f"sbp={sbp!r} has {len(entries)} entries, the placement {placement.ndim} axes\n"
            f"  {placement!r} has axes {axes}\n  give one entry an axis, as in sbp=({fix})"
        )
    return tuple(map(_one, entries))


def _one(entry: object) -> Sbp:
    if isinstance(entry, str):
        read = parse(entry)
        if isinstance(read, Split | Broadcast | Partial):
            return read
    elif isinstance(entry, Split | Broadcast | Partial):
        return entry
    fix = "; write S(0), with the dim that is split" if entry is S else "; write S(0), B, P, P('max') or P('min')"
    raise SbpError(f"{'S' if entry is S else repr(entry)} is no signature of an axis{fix}")


def parse(text: str) -> Sbp | tuple[Sbp, ...] | dict[str, Sbp]:
    """Read a signature's text; an error points at the place.

    >>> parse("(S(0), P(max))"), parse("{data: S(-1)}"), parse("flow.sbp.broadcast")
    ((S(0), P("max")), {'data': S(-1)}, B)
    """
    from lark import UnexpectedInput

    try:
        return _build(_grammar().parse(text), text)
    except UnexpectedInput as wrong:
        said = caret(text, wrong.pos_in_stream or 0 if text.strip() else 0, f"cannot read the signature {text!r}")
        raise SbpError(f"{said}\n  write S(0), B, P, P(max), a tuple (S(0), B) or names {{data: S(0)}}") from None


@cache
def _grammar() -> "Lark":
    from lark import Lark

    return Lark(Path(__file__).with_name("sbp.lark").read_text(), parser="lalr", propagate_positions=True)


def _build(tree: "Tree[Token]", text: str) -> Sbp | tuple[Sbp, ...] | dict[str, Sbp]:
    children = [child for child in tree.children if child is not None]
    if tree.data == "lone":
        return _kind(children[0], text)
    if tree.data == "tuple":
        return tuple(_kind(child, text) for child in children)
    return {str(named.children[0]).strip("\"'"): _kind(named.children[1], text) for named in children}  # type: ignore[union-attr]


def _kind(one: "Tree[Token] | Token", text: str) -> Sbp:
    kind = one.children[-1]  # type: ignore[union-attr]
    if kind.data == "split":
        return S(int(kind.children[0]))
    if kind.data == "broadcast":
        return B
    named = kind.children[0].children if kind.children else ()
    if not named:
        return P
    reduction = str(named[0]).strip("\"'")
    if reduction not in ("sum", "max", "min"):
        place = getattr(named[0], "start_pos", 0)
        raise SbpError(caret(text, place, f"P({reduction}): a partial value is sum, max or min"))
    return P(reduction)
