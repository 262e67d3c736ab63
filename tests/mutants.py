"""Small changes that break the library, and tests that see them: whether the tests still see what they saw.

    python -m tests.mutants draw 20 [--seed 7] [--of nn/graph]     draw changes; those that tests catch go into the list
    python -m tests.mutants run 10 [--seed 7]                      try so many of the list

The list is tests/mutants.txt. One that is drawn is of one line: a comparison, a sign, a bound, a condition. It is tried
in a copy of the repository, with the tests that run by default. One that no test catches is printed: a test is missing,
or the change makes no difference. Lines that are gone are dropped from the list when the next are drawn.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIST", "Change", "changes", "listed", "tried"]

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".txt")
ROOMS = ("placement", "sbp", "boxing", "actors", "nn")
LIMIT = 300.0  # seconds; a change by which a loop never ends is caught too

COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
COUNTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Change:
    """Lines of a file as they are and as they become, and the tests that see the difference."""

    path: str
    before: str
    after: str
    tests: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"-{line}" for line in self.before.split("\n")] + [f"+{line}" for line in self.after.split("\n")]
        return "\n".join([f"{self.path}  {' '.join(self.tests)}", *lines])

    def fits(self) -> bool:
        """Whether the file still has these lines, once."""
        path = ROOT / self.path
        return path.is_file() and f"\n{path.read_text()}".count(f"\n{self.before}\n") == 1


def listed() -> list[Change]:
    found = []
    for block in filter(None, LIST.read_text().strip().split("\n\n")):
        head, *lines = block.splitlines()
        path, *tests = head.split()
        before, after = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Change(path, before, after, tuple(tests)))
    return found


def changes(source: str) -> Iterator[tuple[str, str]]:
    """Lines of a module as they are and as they might be; no text, type, assertion or error is changed.

    >>> [*changes("def f(a, b):\\n    return a if a < b + 1 else min(a, b)")]
    [('    return a if a < b + 1 else min(a, b)', '    return a if a <= b + 1 else min(a, b)'), \
('    return a if a < b + 1 else min(a, b)', '    return a if a < b - 1 else min(a, b)'), \
('    return a if a < b + 1 else min(a, b)', '    return a if a < b + 2 else min(a, b)'), \
('    return a if a < b + 1 else min(a, b)', '    return a if a < b + 1 else max(a, b)')]
    """
    lines = source.splitlines()
    for first, last, old, new in _edits(ast.parse(source)):
        if first is not None and first[0] == last[0]:
            line = lines[first[0] - 1]
            # Columns count bytes, so that a line with other letters is passed over.
            inside = line[first[1] : last[1]]
            if line.isascii() and inside.count(old) == 1:
                yield line, line[: first[1]] + inside.replace(old, new) + line[last[1] :]


Place = tuple[int, int]


def _edits(node: ast.AST) -> Iterator[tuple[Place, Place, str, str]]:
    """Where a text is to be replaced, from and to which place."""
    if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef):
        for part in node.body:
            yield from _edits(part)
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARED:
        yield _end(node.left), _begin(node.comparators[0]), *COMPARED[type(node.ops[0])]
    elif (
        isinstance(node, ast.BinOp) and type(node.op) in COUNTED and not isinstance(node.left, ast.Constant | ast.List)
    ):
        yield _end(node.left), _begin(node.right), *COUNTED[type(node.op)]
    elif isinstance(node, ast.BoolOp) and len(node.values) == 2:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield _end(node.values[0]), _begin(node.values[1]), *words
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _begin(node), _begin(node.operand), "not ", ""
    elif isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1, 2):
        yield _begin(node), _end(node), str(node.value), str(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED:
        yield _begin(node.func), _end(node.func), node.func.id, CALLED[node.func.id]
    for child in ast.iter_child_nodes(node):
        yield from _edits(child)


def _begin(node: ast.expr) -> Place:
    return node.lineno, node.col_offset


def _end(node: ast.expr) -> Place:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def mirrored(path: Path) -> tuple[str, ...]:
    """The tests of a module: the file that mirrors it or, where there is none, those beside where it would be."""
    folder = Path("tests") / path.parent
    mine = folder / f"test_{path.stem}.py"
    found = (
        [mine]
        if (ROOT / mine).is_file()
        else sorted(each.relative_to(ROOT) for each in (ROOT / folder).glob("test_*.py"))
    )
    return tuple(map(str, found))


def tried(change: Change, tree: Path) -> bool:
    """Whether a test that runs by default fails in this copy of the repository, once it has the change."""
    path = tree / change.path
    source = path.read_text()
    path.write_text(f"\n{source}".replace(f"\n{change.before}\n", f"\n{change.after}\n")[1:])
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not alone"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *change.tests],
            cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)
    return done.returncode != 0


def copied(place: Path) -> Path:
    """A copy of the repository, without what was built."""
    left = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, place / "tree", symlinks=True, ignore=left))


def drawn(count: int, seed: int, of: Sequence[str]) -> Iterator[Change]:
    draw = random.Random(seed)
    files = [path for room in of for path in sorted((ROOT / room).rglob("*.py")) if path.name != "__init__.py"]
    while count:
        path = draw.choice(files)
        every, tests = list(changes(path.read_text())), mirrored(path.relative_to(ROOT))
        if every and tests:
            change = Change(str(path.relative_to(ROOT)), *draw.choice(every), tests)
            if change.fits():
                count -= 1
                yield change


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["draw", "run"])
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", nargs="+", default=ROOMS, metavar="FOLDER", help="rooms or folders of the library")
    options = parser.parse_args()
    known = [each for each in listed() if each.fits()]
    if options.what == "run":
        those = random.Random(options.seed).sample(known, min(options.count, len(known)))
    else:
        those = list(drawn(options.count, options.seed, options.of))
    with tempfile.TemporaryDirectory(prefix="sbpflow-mutants-") as place:
        tree = copied(Path(place))
        for change in those:
            caught = tried(change, tree)
            print(f"{'caught' if caught else 'NOT CAUGHT'}: {change}\n", flush=True)
            if caught and options.what == "draw" and change not in known:
                known.append(change)
                LIST.write_text("\n\n".join(map(str, sorted(known, key=str))) + "\n")


if __name__ == "__main__":
    main()
