"""The syntax of one line of a plan: from its letters to a statement, by plan.lark and the grammar of each kind."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from lark import Lark, Tree
from lark.exceptions import UnexpectedInput

from ...model.path_syntax import TextFault
from . import statements
from .statements import Statement
from .syntax_error import SPACES, expected
from .terms import SHARED, Columns

__all__ = ["ReadLine", "reading"]

LETTERS = 10_000  # letters of a statement


class ReadLine(NamedTuple):
    """A statement, and the columns of its parts."""

    statement: Statement
    spans: Columns


@lru_cache(4096)
def reading(code: str) -> ReadLine:
    """The statement of a line without its comment; raises a `TextFault`."""
    if len(code) > LETTERS:
        raise TextFault(0, f"a line of {len(code)} letters", f"a statement has at most {LETTERS}")
    try:
        made = _parser(statements.STATEMENTS)(code)
    except UnexpectedInput as error:
        raise expected(code, error) from None
    made.spans["statement"] = len(code) - len(code.lstrip(SPACES))
    return made


@cache
def _parser(kinds: tuple[type[Statement], ...]) -> Callable[[str], ReadLine]:
    """The parser of lines of these kinds. It makes a tuple of each rule for which nothing else is said."""
    makes: Any = SimpleNamespace(
        **{name: _inline(make) for name, make in SHARED.items()},
        **{_rule(kind): partial(_made, kind) for kind in kinds},
        __default__=lambda rule, parts, _: Tree(rule, parts) if rule.startswith("__") else tuple(parts),  # lark's own
    )
    # Contextual: a word of a statement is one only where it can stand, so an axis may be called `over`.
    made = Lark("\n".join(_grammar(kinds)), parser="lalr", lexer="contextual", transformer=makes)
    return cast("Callable[[str], ReadLine]", made.parse)


def _grammar(kinds: Sequence[type[Statement]]) -> Iterator[str]:
    yield f"?start: statement?\n?statement: {' | '.join(map(_rule, kinds))}"
    own = "\n".join(kind.form.grammar for kind in kinds)
    yield own
    for word in dict.fromkeys(head.split()[0] for kind in kinds for head in kind.form.heads if head[0].isalpha()):
        if f"_{word.upper()}.2:" not in own:  # it begins a line, unless a path begins with it: input.weight: or cast ->
            yield rf"_{word.upper()}.2: /{word}(?!\S)(?!\s*(:|->|<-))/i"
    yield Path(__file__).with_name("plan.lark").read_text(encoding="utf-8")


def _rule(kind: type[Statement]) -> str:
    return kind.form.grammar.strip().partition(":")[0]


def _inline(make: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    return lambda parts: make(*parts)


def _made(kind: type[Statement], parts: Sequence[Any]) -> ReadLine:
    spans: Columns = {}
    return ReadLine(kind.read(spans, *parts), spans)
