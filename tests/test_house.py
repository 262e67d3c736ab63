"""The house stands: arrows between rooms point down, files stay small, and the wheel holds one name."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("placement", "sbp", "boxing", "actors", "nn")  # lowest first
ARROWS = {
    ("sbp", "placement"),
    ("boxing", "placement"),
    ("boxing", "sbp"),
    ("actors", "placement"),
    ("actors", "boxing"),
    ("nn", "placement"),
    ("nn", "sbp"),
    ("nn", "boxing"),
    ("nn", "actors"),
}
DATA = {".py", ".lark", ".rules", ".toml"}


def files(room: str) -> list[Path]:
    return [path for path in sorted((ROOT / room).rglob("*")) if path.is_file() and path.suffix in DATA]


ROOM_CODE = [path.relative_to(ROOT) for room in FLOORS for path in files(room) if path.suffix == ".py"]
ALL_CODE = [
    *ROOM_CODE,
    *(path.relative_to(ROOT) for path in ROOT.glob("sbpflow/*.py")),
    *(
        path.relative_to(ROOT)
        for folder in ("tests", "tools", "benchmarks", "examples")
        for path in files(folder)
        if path.suffix == ".py"
    ),
]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in ROOM_CODE}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name as a dotted path from the root of the house; `loading` if it happens on import."""

    level: int
    target: str
    loading: bool


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file, also those in functions and under TYPE_CHECKING."""

    def visit(node: ast.AST, loading: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(0, name.name, loading) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from .grid import Placement`: the name may be a module or something in it; `settle` decides.
            package = path.parent.parts[: len(path.parent.parts) - node.level + 1] if node.level else ()
            for name in node.names:
                parts = (*package, *(node.module or "").split("."), name.name)
                yield Import(node.level, ".".join(filter(None, parts)), loading)
        later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        body = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, loading and not later and child not in body)

    return visit(ast.parse((ROOT / path).read_text()), True)


def settle(target: str) -> str:
    return target if target in MODULES else target.rpartition(".")[0]


def test_the_floors_allow_the_arrows() -> None:
    assert all(FLOORS.index(low) < FLOORS.index(high) for high, low in ARROWS)


def test_rooms_import_along_the_known_arrows_only() -> None:
    drawn = {
        (path.parts[0], found.target.split(".")[0]) for path in ROOM_CODE for found in imports(path) if found.level
    }
    assert {(src, dst) for src, dst in drawn if src != dst} == ARROWS


def test_no_module_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for path in ROOM_CODE:
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        targets = {settle(found.target) for found in imports(path) if found.level and found.loading}
        graph[module] = targets - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError with the modules of the circle


@pytest.mark.parametrize("path", ALL_CODE, ids=str)
def test_rooms_are_imported_under_one_name(path: Path) -> None:
    """`import sbp` would make a second copy of every class; a room importing the facade closes a circle."""
    forbidden = {*FLOORS, "sbpflow"} if path in ROOM_CODE else {*FLOORS}
    assert not {found.target for found in imports(path) if not found.level and found.target.split(".")[0] in forbidden}


@pytest.mark.parametrize("path", ROOM_CODE, ids=str)
def test_a_file_is_short_and_says_what_it_is_for(path: Path) -> None:
    source = (ROOT / path).read_text()
    assert len(source.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(source))


CLOCKS = {"time", "perf_counter", "process_time", "thread_time"}


def tells_time(node: ast.AST) -> bool:
    """Whether it measures a time. A deadline may be added to and compared with."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "time" and any(name.name in CLOCKS | {"monotonic"} for name in node.names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return ast.unparse(node.left) == "time.monotonic()"
    return isinstance(node, ast.Attribute) and node.attr in CLOCKS and ast.unparse(node.value) == "time"


def test_no_test_asserts_a_time() -> None:
    """A busy machine would fail it. Work is counted (tests/counts.py), times are for benchmarks/."""
    tests = [path for path in ALL_CODE if path.parts[0] == "tests"]
    told = [path for path in tests if any(map(tells_time, ast.walk(ast.parse((ROOT / path).read_text()))))]
    assert [path.as_posix() for path in told] == ["tests/nn/oppool.py"]  # ends workers that do not answer


@pytest.mark.parametrize("name", ["sbpflow", *(f"sbpflow.{room}" for room in FLOORS)])
def test_every_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert not [public for public in module.__all__ if not hasattr(module, public)]


def test_nothing_is_exported_twice() -> None:
    names = [(room, name) for room in ("", ".nn", ".boxing", ".actors", ".sbp") for name in exported(f"sbpflow{room}")]
    twice = Counter(name for _, name in names)
    assert not [(room, name) for room, name in names if twice[name] > 1]


def exported(name: str) -> list[str]:
    return list(importlib.import_module(name).__all__)


def test_the_core_needs_four_packages() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[\[<>=!~; ]", need)[0] for need in needs} == {"torch", "numpy", "lark", "graphviz"}


def test_what_takes_long_to_load_is_not_loaded_before_it_is_needed() -> None:
    code = (
        "import sys, sbpflow; sbpflow.placement('cpu', [0]); print({'lark', 'sympy', 'torch._dynamo'} & {*sys.modules})"
    )
    path = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=path, stdout=-1, check=True).stdout == b"set()\n"


def test_the_wheel_holds_only_sbpflow(tmp_path: Path) -> None:
    # Built from a copy: setuptools takes up what an earlier build left in the tree, and leaves more.
    clutter = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=clutter)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not re.match(r"sbpflow-[^/]+\.dist-info/", name)}
    rooms = {f"sbpflow/{path.relative_to(ROOT)}" for room in FLOORS for path in files(room)}
    assert held == rooms | {"sbpflow/__init__.py", "sbpflow/__main__.py", "sbpflow/py.typed"}

    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    load = [sys.executable, "-c", "import sbpflow; print(sbpflow.__file__)"]
    where = subprocess.run(load, cwd=tmp_path / "site", capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(tmp_path))
