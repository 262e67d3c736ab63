"""Plans read: from a text to its lines, each with its statement and with where its parts stand."""

import re

from ....placement.errors import SbpError
from ...model.path_syntax import TextFault
from .lines import Line, conflict, wrong
from .statements import Grid

__all__ = ["BYTES", "read"]

LINES = 10_000  # lines of a plan, comments too
STATEMENTS = 2_000  # fewer, because each is parsed
LETTERS = 200_000  # letters of all statements
BYTES = 1 << 24  # bytes of the file

_HALF = re.compile("[\ud800-\udfff]")  # no file of text can hold it


def read(text: str, name: str = "") -> tuple[Line, ...]:
    """The lines of a plan, or the error of the first that is wrong; `name` is that of its file.

    >>> [str(line.statement) for line in read("grid (data=2)  # two ranks\\nstates **: data = S(0)")]
    ['grid (data=2)', 'states **: data=S(0)']
    """
    from .syntax import reading  # with lark, which takes long to load

    if not isinstance(text, str):
        raise SbpError(f"a plan is a text, found {type(text).__name__}\n  flow.Plan.load reads a file")
    count = text.count("\n") + (not text.endswith("\n"))
    if count > LINES:
        raise SbpError(f"{name or 'plan'}, line {LINES + 1}: a plan of {count} lines\n  there are at most {LINES}")
    half = _HALF.search(text)
    if half is not None:
        number = text.count("\n", 0, half.start()) + 1
        raise SbpError(f"{name or 'plan'}, line {number}: {half[0]!r} is half a letter\n  decode the text as UTF-8")
    lines, grid, said, letters = list[Line](), None, 0, 0
    for number, raw in enumerate(text.removesuffix("\n").split("\n") if text else (), 1):
        code = raw.partition("#")[0]
        if number == 1 and code.startswith("\ufeff"):  # the mark that some editors begin a file with
            code = " " + code[1:]
        if not code.strip():
            lines.append(Line(number, raw))
            continue
        said, letters = said + 1, letters + len(code)
        try:
            if said > STATEMENTS or letters > LETTERS:
                what = f"{LETTERS} letters" if letters > LETTERS else f"{STATEMENTS} statements"
                raise TextFault(0, f"a plan of more than {what}", "patterns as model.layers.*.mlp say much in one line")
            made = reading(code)
        except TextFault as fault:
            raise wrong(name, Line(number, raw), fault.at, fault.message, fault.fix) from None
        line = Line(number, raw, made.statement, made.spans)
        if isinstance(made.statement, Grid):
            if grid is not None:
                both = [(each, each.spans["statement"]) for each in (grid, line)]
                raise conflict(name, both[0], both[1], "the grid stands twice", "keep one of them")
            grid = line
        lines.append(line)
    return tuple(lines)
