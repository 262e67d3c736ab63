"""Errors of the syntax in plain words: the words expected in a line, those found, and a line like it."""

import re

from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ....placement.errors import did_you_mean, nearest
from ...model.path_syntax import TextFault
from . import statements

__all__ = ["SPACES", "examples", "expected"]

SPACES = " \t\r\f\v\xa0"  # that plan.lark ignores

# Terminals of plan.lark, by their names in errors; others are words that stand for themselves.
WORDS = {
    "$END": "the end of the line", "COLON": "':'", "COMMA": "','", "EQUAL": "'='", "HOLE": "'?'",
    "INT": "a whole number", "INTO": "'<-'", "LESS": "'<='", "LPAR": "'('", "NAME": "an axis", "NUMBER": "a number",
    "OUT": "'->'", "PATH": "a path", "RPAR": "')'", "SBP": "a signature such as S(0)", "UNIT": "a unit such as GiB",
    "WORD": "a name",
}  # fmt: skip


def examples() -> dict[str, str]:
    """A line of each kind, by the words that it begins with, or the sign that it has."""
    return {
        head: line
        for kind in statements.STATEMENTS
        for head, line in zip(kind.form.heads, kind.form.examples, strict=False)
    }


def expected(code: str, error: UnexpectedInput) -> TextFault:
    """The fault of a line that is no statement."""
    allowed, at = _allowed(error), _place(code, error)
    start = len(code) - len(code.lstrip(SPACES))
    word = re.split(r"[\s(:]", code[start:], maxsplit=1)[0]
    known = _misread(code, start, word, at, allowed)
    if known is not None:
        return known
    found = re.match(r"[\w.*-]+|<=|->|<-|.", code.rstrip(SPACES)[at:], re.DOTALL)
    said = WORDS | _words(word.lower())
    here = [said.get(name, repr(name.lower())) for name in sorted(allowed)]
    wanted = _listed(here or [WORDS["$END"]]) if at > start else "a statement"
    meant = did_you_mean(found[0], re.findall(r"'([^' ]+)", " ".join(here)), "") if found else ""
    return TextFault(
        at,
        f"expected {wanted}, found {repr(found[0][:40]) if found else 'the end of the line'}",
        f"{meant} as in {_example(code, word.lower())}".lstrip(),
    )


def _words(word: str) -> dict[str, str]:
    """The words for terminals in lines that begin so."""
    kinds = [kind for kind in statements.STATEMENTS if kind.form.heads[0].split()[0] == word]
    return {name: said for kind in kinds for name, said in kind.form.words.items()}


def _allowed(error: UnexpectedInput) -> set[str]:
    """The terminals that could stand there."""
    names = set[str]()
    if isinstance(error, UnexpectedToken):
        names = set(error.accepts or error.expected)
    elif isinstance(error, UnexpectedCharacters):
        names = set(error.allowed or ())
    return {name.lstrip("_") for name in names if name == "$END" or name.isidentifier()}


def _place(code: str, error: UnexpectedInput) -> int:
    """The column where a line goes wrong; its end is where its last letter is, whatever spaces follow."""
    ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
    at = len(code) if ended or error.pos_in_stream is None else error.pos_in_stream
    return min(at + len(code[at:]) - len(code[at:].lstrip(SPACES)), len(code.rstrip(SPACES)))


def _misread(code: str, start: int, word: str, at: int, allowed: set[str]) -> TextFault | None:
    """A mistake that is known, of which more can be said than what was expected."""
    known = examples()
    if word.lower() not in known and allowed & {"COLON", "INTO", "OUT"}:  # it was taken for a path
        heads = [each for each in known if each.isalpha()]
        for near in nearest(word, heads)[:1]:
            fix = f"{did_you_mean(word, heads)} as in {known[near]}"
            return TextFault(start, f"no line begins with {word[:40]!r}", fix)
    lone = re.search(r"\b([SBP])\s*$", code[:at]) if allowed == {"EQUAL"} else None
    if lone is not None:
        return TextFault(lone.start(), f"this {lone[1]} is of no axis", "name the axis, as in data=S(0)")
    return None


def _example(code: str, word: str) -> str:
    """A line like one that is none."""
    second = " ".join(code.lower().replace("<", " <").split()[:2])
    sign = next((sign for sign in ("->", "<-", ":") if sign in code), ":")
    known = examples()
    return known.get(second) or known.get(word) or known[sign]


def _listed(words: list[str]) -> str:
    *others, last = dict.fromkeys(words)
    return f"{', '.join(others)} or {last}" if others else last
