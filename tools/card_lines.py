"""Statements of the package that say what a card does, and which of them ran.

    python -m tools.card_lines [FILE]      all, or those that did not run by a file of those that did

A statement is of a card if it says one of WORDS, or stands in an `if` whose condition does; imports and what runs as a
module is loaded do not count, nor do texts. Processes of a played card that find CARD_LINES=FILE in their environment
add each statement's place to that file when it runs first.
"""

import ast
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

__all__ = ["ROOMS", "CardStatement", "record", "statements", "unreached"]

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("placement", "sbp", "boxing", "actors", "nn")
WORDS = re.compile(
    r"cuda|nccl|is_cpu|pin_memory|\bpinned=|\.card\b|card_of|card_here|side_stream|current_stream|on_stream|recorded\("
    r"|record_stream|wait_stream|wait_event|\bLater\b|\bOnStream\b|\bCardLine\b|\bCardLink\b|\bGone\b|without_eights"
)
SIMPLE = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, order=True)
class CardStatement:
    path: str
    first: int
    last: int  # line
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.first}: {self.text}"


def statements() -> list[CardStatement]:
    return [each for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for each in sorted({*of_file(path)})]


def of_file(path: Path) -> Iterator[CardStatement]:
    source = path.read_text(encoding="utf-8")
    if not WORDS.search(source):
        return
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for each in chosen(function.body, lines, False):
                last = header_end(each)
                yield CardStatement(str(path.relative_to(ROOT)), each.lineno, last, lines[each.lineno - 1].strip())


def chosen(body: list[ast.stmt], lines: list[str], all_of_it: bool) -> Iterator[ast.stmt]:
    for each in body:
        if isinstance(each, SIMPLE) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)):
            continue
        named = bool(WORDS.search(said(each)))
        if named or all_of_it:
            yield each
        within = all_of_it or (named and isinstance(each, ast.If))
        for name in ("body", "orelse", "finalbody"):
            yield from chosen(getattr(each, name, []), lines, within)
        for handler in getattr(each, "handlers", []):
            yield from chosen(handler.body, lines, within)


def header_end(each: ast.stmt) -> int:
    """The last line of a statement, or of what stands before the body of a compound one."""
    body = getattr(each, "body", None)
    return max(each.lineno, body[0].lineno - 1) if body else each.end_lineno or each.lineno


def said(each: ast.stmt) -> str:
    """The code of a statement but for its body and for texts."""
    parts = [value for name, value in ast.iter_fields(each) if name not in ("body", "orelse", "finalbody", "handlers")]
    nodes = [node for part in parts for node in (part if isinstance(part, list) else [part])]
    return " ".join(ast.unparse(Wordless().visit(ast.parse(ast.unparse(n)))) for n in nodes if isinstance(n, ast.expr))


class Wordless(ast.NodeTransformer):
    """Code whose texts of several words are gone."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) and " " in node.value else node


def ran(file: Path) -> set[tuple[str, int]]:
    """Places that a file has."""
    pairs = (line.rpartition(":") for line in file.read_text(encoding="utf-8").splitlines() if ":" in line)
    return {(path, int(at)) for path, _, at in pairs}


def unreached(file: Path) -> list[CardStatement]:
    places = ran(file)
    return [
        each for each in statements() if not any((each.path, k) in places for k in range(each.first, each.last + 1))
    ]


def record(file: str) -> None:
    """From now on, and in threads that start later."""
    wanted: dict[str, set[int]] = {}
    for each in statements():
        wanted.setdefault(str(ROOT / each.path), set()).update(range(each.first, each.last + 1))
    left: dict[CodeType, set[int]] = {}
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def lines_of(code: CodeType) -> set[int]:
        found = left.get(code)
        if found is None:
            inside = wanted.get(os.path.realpath(code.co_filename), set()) if ".py" in code.co_filename else set[int]()
            found = left[code] = {line for _, _, line in code.co_lines() if line in inside} if inside else set()
        return found

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return line if lines_of(frame.f_code) else None

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        todo = lines_of(frame.f_code)
        if event == "line" and frame.f_lineno in todo:
            todo.discard(frame.f_lineno)
            path = os.path.relpath(os.path.realpath(frame.f_code.co_filename), ROOT)
            os.write(out, f"{path}:{frame.f_lineno}\n".encode())
        return line if todo else None

    threading.settrace(called)
    sys.settrace(called)


if __name__ == "__main__":
    shown = unreached(Path(sys.argv[1])) if len(sys.argv) > 1 else statements()
    print("\n".join(map(str, shown)))
    print(f"{len(shown)} of {len(statements())}")
