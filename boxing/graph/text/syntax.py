"""The grammar of a graph's text: from characters to what its lines say, before anyone asks whether that can be."""

import math
import re
from ast import literal_eval
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken, VisitError

from ....placement.errors import SbpError, caret, did_you_mean
from ....sbp.call import Indices
from ....sbp.logical import Origin, Round, SavedOffload

__all__ = [
    "BackLine",
    "CallLine",
    "Factor",
    "Keyword",
    "WrittenLayout",
    "GraphLine",
    "Misread",
    "Note",
    "Typed",
    "name_of",
    "read",
    "whole",
]

WORDS = {
    "BUCKET": "'bucket'", "BY": "'by'", "COLON": "':'", "END": "the end of the line",
    "ENTRY": "a signature as (S(0), B)",
    "EQUAL": "'='", "FORWARD": "'forward'", "BACKWARD": "'backward'", "FROM": "'from'", "GRAD": "'grad'",
    "GRADS": "'grads'",
    "GRAPH": "'graph'", "GRID": "a placement as cpu:[0-3]", "KEY": "an argument's name", "KIND": "a source",
    "LABEL": "a name", "LBRACE": "'{'",
    "LITERAL": "a value as %x, a number, a text, a list or the like", "LOSS": "'loss'",
    "LPAR": "'('", "LSQB": "'['", "NO_GRAD": "'no_grad'",
    "NUMBER": "a number", "OFFLOAD": "'offload'", "ON": "'on'", "ONCE": "'once'", "OP": "an op as linear(...)",
    "OWNER": "'owner'",
    "PLACE": "p0 = ...", "RBRACE": "'}'",
    "RETURN": "'return'", "ROUND": "'round'", "RPAR": "')'", "RSQB": "']'", "SEMICOLON": "';'", "STATES": "'states'",
    "STRING": "a text", "TYPE": "a dtype and shape as float32[8, 64]", "VALUE": "a value as %x", "WORD": "a word",
    "WHOLE": "'whole'", "WRITE": "'write'", "_COMMA": "','",
}  # fmt: skip

_LITERAL = {"VALUE", "NUMBER", "STRING", "WORD"}  # where these can stand, any argument can
_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANTS = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
_MADE: dict[str, Callable[..., Any]] = {"complex": complex, "device": torch.device, "slice": slice, "indices": Indices}
_NAME = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s'\"]+"
_ORIGIN = re.compile(
    rf"(?:.*; )?(?:in ({_NAME}) ?)?(?:of ({_NAME}) ?)?(?:at ({_NAME}) ?)?(?:recompute ({_NAME}) ?)?"
    rf"(?:kept of ({_NAME}) ?)?"
    r"(?:offload (cpu|disk) (\d+))?"
)


class Misread(Exception):
    """A mistake at a token; becomes an error with the line once the text is at hand."""

    def __init__(self, at: Token, message: str, fix: str = "", *, offset: int = 0) -> None:
        super().__init__(message)
        self.pos, self.message, self.fix = (at.start_pos or 0) + offset, message, fix

    def shown(self, text: str) -> SbpError:
        return SbpError(caret(text, self.pos, self.message) + (f"\n  {self.fix}" if self.fix else ""))


class Factor(NamedTuple):
    """An axis, by name or number, or `all 2`."""

    first: Token
    number: Token | None


class Note(NamedTuple):
    """`dim 0: tensor, data` and its like."""

    about: Token
    number: Token | None
    factors: tuple[Factor, ...]


class WrittenLayout(NamedTuple):
    """A layout as it is written; two that are written alike are equal, wherever they stand."""

    type: Token | None
    sbp: tuple[Token, ...]
    notes: tuple[Note, ...]
    place: Token | None


class Typed(NamedTuple):
    name: Token
    lie: WrittenLayout
    grad: bool


class Keyword(NamedTuple):
    name: Token
    value: Any


class CallLine(NamedTuple):
    """A step; in its arguments values stand as tokens, everything else as itself."""

    outputs: tuple[Typed, ...]
    op: Token
    args: tuple[Any, ...]
    grad: bool
    origin: Origin
    round: Round | None


class BackLine(NamedTuple):
    into: Token
    of: Token
    src: WrittenLayout
    dst: WrittenLayout
    bucket: int | None
    by: Token | None


class GraphLine(NamedTuple):
    """Any other line: what it begins with, and its parts."""

    kind: str
    parts: tuple[Any, ...]


@v_args(inline=True)
class _Build(Transformer[Token, Any]):
    """Lines from the grammar's rules, which carry the names of these methods."""

    def start(self, *parts: Any) -> list[Any]:
        label = next(part for part in parts if isinstance(part, Token) and part.type == "LABEL")
        return [GraphLine("graph", (label,)), *(part for part in parts if not isinstance(part, Token))]

    def place(self, name: Token, grid: Token, _end: Token) -> GraphLine:
        return GraphLine("place", (name, grid))

    def source(
        self,
        kind: Token,
        value: Typed,
        grads: WrittenLayout | None,
        states: WrittenLayout | None,
        once: bool | None,
        many: Token | None,
        owner: Token | None,
        offload: Token | None,
        _end: Token,
    ) -> GraphLine:
        return GraphLine("source", (kind, value, (grads, states), bool(once), (many, owner), offload))

    def once(self) -> bool:
        return True

    def step(self, *parts: Any) -> CallLine:
        *outputs, (op, args, grad, turn), end = parts
        return CallLine(tuple(outputs), op, args, grad, _origin(end), turn)

    def call(self, op: Token, *parts: Any) -> tuple[Token, tuple[Any, ...], bool, Round | None]:
        *args, no_grad, turn = parts
        return op, tuple(args), no_grad is None, turn

    def round(self, *numbers: Token) -> Round:
        *axes, number = map(whole, numbers)
        return Round(tuple(axes), number)

    def back(
        self,
        into: Token,
        of: Token,
        src: WrittenLayout,
        dst: WrittenLayout,
        bucket: Token | None,
        by: Token | None,
        _end: Token,
    ) -> BackLine:
        return BackLine(into, of, src, dst, None if bucket is None else whole(bucket), by)

    def result(self, value: Any, _end: Token) -> GraphLine:
        return GraphLine("result", (value,))

    def loss(self, loss: Token, start: Token | None, _end: Token) -> GraphLine:
        return GraphLine("loss", (loss, start))

    def write(self, name: Token, value: Token, _end: Token) -> GraphLine:
        return GraphLine("write", (name, value))

    def value(self, name: Token, lie: WrittenLayout, grad: Token | None) -> Typed:
        return Typed(name, lie, grad is not None)

    def lie(
        self, type: Token | None, sbp: tuple[Token, ...], notes: tuple[Note, ...], place: Token | None
    ) -> WrittenLayout:
        return WrittenLayout(type, sbp, notes, place)

    def sbp(self, *entries: Token) -> tuple[Token, ...]:
        return entries

    def notes(self, *notes: Note) -> tuple[Note, ...]:
        return notes

    def note(self, about: Token, number: Token | None, *factors: Factor) -> Note:
        return Note(about, number, factors)

    def factor(self, first: Token, number: Token | None = None) -> Factor:
        return Factor(first, number)

    def keyword(self, name: Token, value: Any) -> Keyword:
        return Keyword(name, value)

    def number(self, number: Token) -> int | float:
        return int(number) if number.lstrip("-").isdecimal() else float(number)

    def string(self, text: Token) -> Any:
        return _unquoted(text, 0)

    def word(self, word: Token) -> Any:
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        found = getattr(torch, word, None)
        if isinstance(found, _KINDS):
            return found
        known = [*_CONSTANTS, *(name for name in dir(torch) if isinstance(getattr(torch, name), _KINDS))]
        raise Misread(word, f"{str(word)!r} is no constant, dtype, layout or memory format", did_you_mean(word, known))

    def listed(self, *parts: Any) -> list[Any]:
        return list(parts)

    def tupled(self, *parts: Any) -> tuple[Any, ...]:
        return parts

    def mapped(self, brace: Token, *pairs: tuple[Any, Any]) -> dict[Any, Any]:
        try:
            return dict(pairs)
        except TypeError as error:
            raise Misread(
                brace, f"this dict cannot be: {error}", "a key is a number, a text, or a tuple of them"
            ) from None

    def pair(self, key: Any, value: Any) -> tuple[Any, Any]:
        return key, value

    def made(self, name: Token, *parts: Any) -> Any:
        if name not in _MADE or any(isinstance(part, Token) for part in parts):
            fix = f"an argument is a value or a literal; {', '.join(_MADE)} can be written so"
            raise Misread(name, f"{name}(...) cannot stand in an argument", fix)
        try:
            return _MADE[name](*parts)
        except (TypeError, ValueError, RuntimeError) as error:
            fix = "write it as complex(1.0, 2.0), device('cuda:0') or slice(0, 4, None)"
            raise Misread(name, f"no such {name}: {str(error).splitlines()[0]}", fix) from None


def whole(number: Token) -> int:
    """The number, which must be a whole one."""
    if not number.lstrip("-").isdecimal():
        raise Misread(number, f"expected a whole number, found {number}", "write it without a point, such as 2")
    return int(number)


def name_of(token: Token) -> str:
    """The name that a token of a value, with its sign, or of a graph says."""
    at = int(token.type == "VALUE")
    return _unquoted(token, at) if token[at] in "'\"" else str(token[at:])


def _unquoted(token: Token, at: int) -> str:
    try:
        text: str = literal_eval(token[at:])
    except (SyntaxError, ValueError):
        raise Misread(token, f"{token[at:]} is no text that Python could read") from None
    return text


def _origin(end: Token) -> Origin:
    comment = end.partition("\n")[0]
    found = _ORIGIN.fullmatch(comment[1:].strip()) if comment.startswith("#") else None
    if found is None:
        return Origin()
    said = [literal_eval(part) if part and part[0] in "'\"" else part or "" for part in found.groups()]
    module, block, line, recompute, kept, to, ahead = said
    offload = SavedOffload(to, int(ahead)) if to else None  # type: ignore[arg-type]  # as the pattern says
    return Origin(module, line, block, recompute, kept, offload=offload)


def read(text: str) -> list[Any]:
    """The lines of a text, in order."""
    try:
        return _grammar().parse(f"{text}\n")  # type: ignore[return-value]
    except Misread as error:
        raise error.shown(text) from None
    except VisitError as error:
        if isinstance(error.orig_exc, Misread):
            raise error.orig_exc.shown(text) from None
        raise error.orig_exc from None
    except UnexpectedInput as error:
        raise SbpError(_expected(text, error)) from None


def _expected(text: str, error: UnexpectedInput) -> str:
    """A syntax error in plain words."""
    pos = max(0, error.pos_in_stream or 0)
    found, allowed = "the end of the text", set[str]()
    if isinstance(error, UnexpectedToken):
        token = error.token
        if token.type == "$END":
            pos = len(text)
        else:
            found = "the end of the line" if token.type == "END" else repr(str(token).rstrip())
        allowed = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        found, allowed = repr(text[pos : pos + 16].split()[0] if text[pos:].strip() else ""), set(error.allowed or ())
    if "GRAPH" in allowed:  # empty lines may stand before it, but nobody misses them
        allowed.discard("END")
    if allowed >= _LITERAL:
        allowed = allowed - _LITERAL - {"LPAR", "LSQB", "LBRACE", "OP", "KEY"} | {"LITERAL"}
    words = " or ".join(WORDS[name] for name in sorted(allowed) if name in WORDS)
    return caret(text, pos, f"expected {words}, found {found}") + "\n  a line is as %y: float32[8] S(0) = relu(%x)"


@cache
def _grammar() -> Lark:
    source = Path(__file__).with_name("graph.lark").read_text(encoding="utf-8")
    return Lark(source, parser="lalr", lexer="contextual", transformer=_Build(), propagate_positions=False)
