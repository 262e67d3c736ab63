"""Errors of the syntax in plain words: what was expected in a line that is none, what was found, and a line like it."""

import re
from difflib import get_close_matches

from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ...model.path_syntax import TextFault
from .words import EXAMPLES, MORE_WORDS, WORDS

__all__ = ["expected"]

SPACES = " \t\r\f\v\xa0"  # that plan.lark ignores


def expected(code: str, error: UnexpectedInput) -> TextFault:
    """The fault of a line that is no statement."""
    allowed, at = _allowed(error), _place(code, error)
    start = len(code) - len(code.lstrip(SPACES))
    word = re.split(r"[\s(:]", code[start:], maxsplit=1)[0]
    known = _misread(code, start, word, at, allowed)
    if known is not None:
        return known
    found = re.match(r"[\w.*-]+|<=|->|<-|.", code.rstrip(SPACES)[at:], re.DOTALL)
    here = [MORE_WORDS.get((word.lower(), name)) or WORDS[name] for name in sorted(allowed)]
    wanted = _listed(here or [WORDS["$END"]]) if at > start else "a statement"
    meant = get_close_matches(found[0].lower(), re.findall(r"'([^' ]+)", " ".join(here)), 1, 0.7) if found else []
    return TextFault(
        at,
        f"expected {wanted}, found {repr(found[0][:40]) if found else 'the end of the line'}",
        (f"did you mean {meant[0]!r}? " if meant else "") + f"as in {_example(code, word.lower())}",
    )


def _allowed(error: UnexpectedInput) -> set[str]:
    """The terminals that could stand there."""
    names = set[str]()
    if isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        names = set(error.allowed or ())
    return names & WORDS.keys()


def _place(code: str, error: UnexpectedInput) -> int:
    """The column where a line goes wrong; its end is where its last letter is, whatever spaces follow."""
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    at = len(code) if ended or error.pos_in_stream is None else error.pos_in_stream
    return min(at + len(code[at:]) - len(code[at:].lstrip(SPACES)), len(code.rstrip(SPACES)))


def _misread(code: str, start: int, word: str, at: int, allowed: set[str]) -> TextFault | None:
    """A mistake that is known, of which more can be said than what was expected."""
    if word.lower() not in EXAMPLES and allowed & {"COLON", "INTO", "OUT"}:  # it was taken for a path
        meant = get_close_matches(word.lower(), [each for each in EXAMPLES if each.isalpha()], 1, 0.7)
        if meant:
            return TextFault(start, f"no line begins with {word[:40]!r}", f"did you mean {EXAMPLES[meant[0]]!r}?")
    lone = re.search(r"\b([SBP])\s*$", code[:at]) if allowed == {"EQUAL"} else None
    if lone is not None:
        return TextFault(lone.start(), f"this {lone[1]} is of no axis", "name the axis, as in data=S(0)")
    return None


def _example(code: str, word: str) -> str:
    """A line like one that is none."""
    second = " ".join(code.lower().replace("<", " <").split()[:2])
    sign = next((sign for sign in ("->", "<-", ":") if sign in code), ":")
    return EXAMPLES.get(second) or EXAMPLES.get(word) or EXAMPLES[sign]


def _listed(words: list[str]) -> str:
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last
