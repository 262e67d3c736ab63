"""The text form of a placement, `cpu:[0-3] as (data=2, tensor=2)`, read by the grammar in placement.lark."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from lark import Lark, ParseTree, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from .errors import PlacementError, caret
from .ranks import check_count, check_name, check_type, number

__all__ = ["PlacementText", "parse"]

EXAMPLE = "a placement is written like cpu:[0-3] or cpu:[0-3] as (data=2, tensor=2)"

WORDS = {
    "$END": "the end",
    "AS": "'as'",
    "COLON": "':'",
    "COMMA": "','",
    "DEVICE": "a device type",
    "EQUAL": "'='",
    "INT": "a number",
    "LPAR": "'('",
    "LSQB": "'['",
    "MINUS": "'-'",
    "NAME": "an axis name",
    "RPAR": "')'",
    "RSQB": "']'",
}


class PlacementText(NamedTuple):
    """The fields of a placement as a text says them, in the order that its constructor takes them."""

    type: str
    flat: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...] | None


def parse(text: str) -> PlacementText:
    """Read the text form; spaces are free, and an error shows the text with a caret.

    >>> parse("cuda:[0-2, 8] as (x=2, y=2)")
    PlacementText(type='cuda', flat=(0, 1, 2, 8), shape=(2, 2), names=('x', 'y'))
    """
    if not isinstance(text, str):
        raise PlacementError(f"a placement needs a text, or a type and ranks\n  found {text!r}\n  {EXAMPLE}")
    try:
        tree = _grammar().parse(text)
    except UnexpectedInput as error:
        raise PlacementError(_expected(text, error)) from None
    device, *runs, grid = tree.children
    assert isinstance(device, Token)
    with _caret_at(text, device):
        check_type(str(device))
    flat = _ranks(text, [_tokens(run) for run in runs])
    if grid is None:
        return PlacementText(str(device), flat, (len(flat),), None)
    sizes = [token for token in _tokens(grid) if token.type == "INT"]
    names = [token for token in _tokens(grid) if token.type == "NAME"]
    with _caret_at(text, sizes[0]):
        shape = tuple(map(number, sizes))
        if prod(shape) != len(flat):
            product = " x ".join(map(str, shape)) + (f" = {prod(shape)}" if len(shape) > 1 else "")
            raise PlacementError(f"the grid has {product} places, but {len(flat)} ranks are given")
    for k, name in enumerate(names):
        with _caret_at(text, name):
            check_name(str(name))
            if name in names[:k]:
                raise PlacementError(f"axis name {str(name)!r} stands twice")
    return PlacementText(str(device), flat, shape, tuple(map(str, names)) or None)


def _ranks(text: str, runs: list[list[Token]]) -> tuple[int, ...]:
    """The ranks that the runs name, each once."""
    seen: dict[int, None] = {}
    for run in runs:
        with _caret_at(text, run[0]):
            lo, hi = number(run[0]), number(run[-1])
            check_count(len(seen) + max(0, hi - lo + 1))
            if hi < lo:
                raise PlacementError(f"the range {lo}-{hi} runs backwards\n  a range ascends: {hi}-{lo}")
            twice = next((rank for rank in range(lo, hi + 1) if rank in seen), None)
            if twice is not None:
                raise PlacementError(f"a placement holds each rank once, but {twice} stands twice")
        seen.update(dict.fromkeys(range(lo, hi + 1)))
    return tuple(seen)


def _tokens(node: ParseTree | Token | None) -> list[Token]:
    """The tokens below a node, from left to right."""
    assert isinstance(node, Tree)
    return list(node.scan_values(lambda leaf: isinstance(leaf, Token)))


@contextmanager
def _caret_at(text: str, token: Token) -> Iterator[None]:
    """Show the text with a caret under `token` below the first line of whatever is refused inside."""
    try:
        yield
    except PlacementError as error:
        first, *rest = str(error).split("\n")
        raise PlacementError("\n".join([caret(text, token.start_pos or 0, first), *rest])) from None


def _expected(text: str, error: UnexpectedInput) -> str:
    """A syntax error in plain words."""
    end = len(text.rstrip())
    pos, found, allowed = error.pos_in_stream or 0, "", set[str]()
    if isinstance(error, UnexpectedToken):
        ended = error.token.type == "$END"
        pos, found = (end, "the end") if ended else (pos, repr(str(error.token)))
        allowed = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        found, allowed = repr(text[pos]), set(error.allowed or ())
    words = " or ".join(sorted(WORDS[name] for name in allowed if name in WORDS))
    return caret(text, pos, f"expected {words}, found {found}") + f"\n  {EXAMPLE}"


@cache
def _grammar() -> Lark:
    source = Path(__file__).with_name("placement.lark").read_text(encoding="utf-8")
    # Contextual: `as` is a word only where no name can stand, so an axis may be called `asx`.
    return Lark(source, parser="lalr", lexer="contextual", maybe_placeholders=True)
