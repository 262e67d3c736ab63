"""Encoders by name: functions by which users make them, and the texts of them in graphs and plans."""

import ast
from collections.abc import Iterator

from ...placement.errors import SbpError
from ..encoding import FilledRows, MoveEncoder
from .bits import SignEncoder
from .encoder import Encoder
from .low_rank import LowRankEncoder
from .phases import LaterEncoder, MomentumEncoder
from .quantised import Int4Encoder, Int8Encoder
from .sparse import TopKEncoder

__all__ = ["encoder_of", "int4", "int8", "later", "low_rank", "momentum", "sign", "topk"]

sign, topk, low_rank, int8, int4 = SignEncoder, TopKEncoder, LowRankEncoder, Int8Encoder, Int4Encoder
later, momentum = LaterEncoder, MomentumEncoder
SHIPPED: dict[str, type[MoveEncoder]] = {
    each.name: each for each in (sign, topk, low_rank, int8, int4, later, momentum, FilledRows)
}  # users' own are found under their classes' names


def encoder_of(text: str) -> MoveEncoder:
    """The encoder that a text says, such as `topk(fraction=0.1)`; a user's own by its name or its class's.

    >>> encoder_of("later(steps=100, of=sign(rows=True))")
    LaterEncoder(feedback=True, twice=False, steps=100, of=SignEncoder(feedback=True, twice=False, rows=True))
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _unread(text) from None
    return _made(tree, text)


def _made(tree: ast.expr, text: str) -> MoveEncoder:
    call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
        raise _unread(text)
    known = {**{each.name or each.__name__: each for each in _users(Encoder)}, **SHIPPED}
    kind = known.get(call.func.id)
    if kind is None:
        raise SbpError(
            f"no encoder is called {call.func.id!r}\n"
            f"  there are {', '.join(sorted(SHIPPED))}, and those that you define"
        )
    said: dict[str, object] = {}
    for word in call.keywords:
        value = word.value
        said[str(word.arg)] = _made(value, text) if isinstance(value, ast.Call) else _literal(value, text)
    try:
        return kind(**said)  # type: ignore[arg-type]
    except TypeError as error:
        what = str(error).partition(".__init__() ")[2] or str(error)
        raise SbpError(f"{call.func.id}(...) {what}\n  write it as flow.encoders.{call.func.id} takes it") from None


def _literal(value: ast.expr, text: str) -> object:
    try:
        found: object = ast.literal_eval(value)
    except ValueError:
        raise _unread(text) from None
    return found


def _unread(text: str) -> SbpError:
    return SbpError(f"{text!r} is no encoder\n  write a name with what it takes, as in topk(fraction=0.01)")


def _users(of: type[Encoder]) -> Iterator[type[Encoder]]:
    for each in of.__subclasses__():
        yield each
        yield from _users(each)
