"""Formulas of marks, such as `2*(p-s)-1` or `min(p//2, p-s)`, read once and worked out for every stage."""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

from ...placement.errors import ScheduleError, caret

__all__ = ["NAMES", "fault", "formula", "known_names"]

NAMES = {
    "p": "devices",
    "s": "this device, from 0",
    "m": "micro-batches",
    "v": "chunks on each device",
    "c": "this chunk, from 0 in the order of the model",
    "n": "slices of a sequence",
}

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def formula(text: str, values: Mapping[str, int]) -> int:
    """The value of a formula.

    >>> formula("2*(p-s)-1", {"p": 4, "s": 1})
    5
    """
    wrong = fault(text)
    if wrong is not None:
        raise ScheduleError(caret(text, *wrong) + f"\n  the names are {known_names()}")
    return _value(_parsed(text), values, text)


def fault(text: str) -> tuple[int, str] | None:
    """The first place where the text is no formula, and why; None if it is one.

    >>> fault("p - q")
    (4, 'a formula has no q')
    """
    lead = len(text) - len(text.lstrip())
    try:
        wrong = _fault(_parsed(text))
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        wrong = max(0, (getattr(error, "offset", None) or 1) - 1), "this is no formula"
    return wrong and (lead + wrong[0], wrong[1])


def _fault(node: ast.expr) -> tuple[int, str] | None:
    inside: list[ast.expr] = []
    match node:
        case ast.Constant(value=int(number)) if number is not True and number is not False:
            pass
        case ast.Name(id=name):
            if name not in NAMES:
                return node.col_offset, f"a formula has no {name}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            inside = [left, right]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inside = [operand]
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as inside, keywords=[]) if name in _FUNCTIONS:
            pass
        case _:
            return node.col_offset, "a formula has whole numbers, + - * // %, min(), max() and names"
    return next(filter(None, map(_fault, inside)), None)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, values: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.BinOp(left=left, op=op, right=right):
            try:
                return _OPERATORS[type(op)](_value(left, values, text), _value(right, values, text))
            except ZeroDivisionError:
                raise ScheduleError(caret(text.strip(), node.col_offset, "this divides by zero")) from None
        case ast.UnaryOp(operand=operand):
            return -_value(operand, values, text)
        case ast.Call(func=ast.Name(id=name), args=given):
            return _FUNCTIONS[name](*(_value(arg, values, text) for arg in given))
    raise AssertionError(f"{text}: fault() let {ast.dump(node)} pass")


def known_names() -> str:
    return ", ".join(f"{name} {what}" for name, what in NAMES.items())
