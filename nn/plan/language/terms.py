"""Terms: words and phrases of a plan as values, each checked, with the nearest word where it is not known."""

import re
from collections.abc import Callable, Collection
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from ....placement.errors import PlacementError, SbpError, did_you_mean
from ....placement.ranks import check_name
from ....sbp import Broadcast, Partial, Sbp, Split
from ....sbp.text import parse
from ...model.path_syntax import TextFault
from ...model.paths import PathPattern
from .axes import AxisEntries

if TYPE_CHECKING:  # lark takes long to load; its token is a text
    from lark import Token
else:
    Token = str

__all__ = [
    "SHARED",
    "Columns",
    "Kind",
    "Kinds",
    "Signature",
    "Token",
    "axis_of",
    "bytes_text",
    "column",
    "fraction",
    "kinds_of",
    "kinds_text",
    "known_word",
    "once",
    "path_of",
    "whole",
]

MOST = 10**9  # ranks, micro-batches, layers
UNITS = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1,
}  # fmt: skip

Kind: TypeAlias = Literal["weights", "grads", "states"]
Kinds: TypeAlias = tuple[Kind, ...]
KINDS: Kinds = get_args(Kind)

Columns: TypeAlias = dict[str, int]  # columns of a line's parts, by their names
Signature: TypeAlias = tuple[AxisEntries, Columns]


def known_word(token: Token, word: str, known: Collection[str], what: str, at: int | None = None) -> str:
    """The word, if it is known; else a fault with the nearest."""
    if word in known:
        return word
    raise TextFault(column(token) if at is None else at, f"{word[:60]!r} is no {what}", did_you_mean(word, known))


def once(spans: Columns, part: str, token: Token, what: str) -> None:
    """Note where a part stands; there may be one of it."""
    if part in spans:
        raise TextFault(column(token), f"{what} stands twice", "leave one out")
    spans[part] = column(token)


def column(token: Token) -> int:
    return token.start_pos or 0


def whole(token: Token, least: int = 0) -> int:
    digits = token.lstrip("0")
    if len(digits) > len(str(MOST)) or not least <= int(digits or 0) <= MOST:
        said = str(token) if len(token) < 20 else f"a number of {len(token)} digits"
        raise TextFault(
            column(token), f"{said} is out of range", f"give {least} or more" if not digits else "give a smaller number"
        )
    return int(digits or 0)


def fraction(token: Token) -> Fraction:
    """A number as it is written, exactly."""
    _, _, power = token.lower().partition("e")
    if len(token) > 30 or abs(int(power or 0)) > 30:
        raise TextFault(column(token), f"{token[:30]} is out of range", "give a number that a machine can have")
    return Fraction(str(token))


def path_of(token: Token, spans: Columns) -> str:
    """A path whose pattern is one."""
    spans["path"] = column(token)
    try:
        PathPattern(str(token)).check()
    except TextFault as fault:
        raise TextFault(column(token) + fault.at, fault.message, fault.fix) from None
    return re.sub(r"\s+", "", token)


def kinds_of(token: Token | None, spans: Columns, extra: tuple[str, ...] = ()) -> Any:
    """Kinds of values in braces or one alone; weights where nothing is said."""
    if token is None:
        return ("weights",)
    spans["kinds"] = column(token)
    inner = re.fullmatch(r"\{(.*)\}", token, re.DOTALL)
    for found in re.finditer(r"[^\s,]+", inner[1] if inner else token):
        at = column(token) + found.start() + (inner is not None)
        word = known_word(token, found[0].lower(), (*KINDS, *extra), "kind of value", at)
        if f"kind:{word}" in spans:
            raise TextFault(at, f"{word} stands twice", "leave one out")
        spans[f"kind:{word}"] = at
    given = tuple(kind for kind in (*KINDS, *extra) if f"kind:{kind}" in spans)
    if not given:
        raise TextFault(column(token), "nothing stands in {}", f"there are {', '.join((*KINDS, *extra))}")
    return given


def kinds_text(kinds: Kinds) -> str:
    if kinds == ("weights",):
        return ""
    return f"{kinds[0]} " if len(kinds) == 1 else f"{{{','.join(kinds)}}} "


def axis_of(token: Token, spans: Columns, part: str = "") -> str:
    try:
        check_name(str(token))
    except PlacementError as error:
        raise TextFault(column(token), str(error).split("\n")[0], f"found {str(token)!r}") from None
    spans[f"axis:{token}"] = column(token)
    if part:
        spans[part] = column(token)
    return str(token)


def _entry_of(token: Token) -> Sbp | None:
    """A signature of an axis; None is the planner's."""
    if token == "?":
        return None
    read = _sbp(str(token))
    if read is None:
        what = f"{token.strip()[:60]!r} is no signature of an axis"
        raise TextFault(column(token), what, "write S(0), B, P, P(max) or ?")
    return read


@lru_cache(256)
def _sbp(text: str) -> Sbp | None:
    try:
        read = parse(re.sub(r"^[sbp](?!\w)", lambda head: head[0].upper(), text))
    except SbpError:
        return None
    return read if isinstance(read, Split | Broadcast | Partial) else None


def _signature_of(*entries: tuple[Token, Token]) -> Signature:
    spans: Columns = {}
    found = []
    for name, entry in entries:
        if f"axis:{name}" in spans:
            raise TextFault(column(name), f"the axis {str(name)!r} stands twice", "give each axis one signature")
        found.append((axis_of(name, spans), _entry_of(entry)))
        spans[f"entry:{name}"] = column(entry)
    return tuple(found), spans


def _size_of(value: Token, unit: Token) -> tuple[Token, int]:
    """A size in bytes, rounded down, behind the number that is written."""
    name = next((name for name in UNITS if name.lower() == unit.lower()), str(unit))
    many = int(fraction(value) * UNITS[known_word(unit, name, UNITS, "unit of memory")])
    if not 0 < many < 2**53:
        raise TextFault(column(value), f"a size of {many} bytes", "give one as in 70 GiB")
    return value, many


def bytes_text(number: int) -> str:
    """As few letters as say it exactly: 70 GiB, 1500 MB, 12345 B."""
    for unit, size in UNITS.items():
        if number and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number} B"


# The functions that make values of the rules of plan.lark.
SHARED: dict[str, Callable[..., Any]] = {
    "signature": _signature_of,
    "hole": lambda token: (None, {"entry": column(token)}),
    "size": _size_of,
}
