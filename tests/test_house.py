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
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tools.house import (
    FLOORS,
    RING,
    ROOM_CODE,
    ROOT,
    arrows,
    files,
    imports,
    imports_in,
    joined,
    map_of,
    ring_imports,
    tree,
    units,
)

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


def test_only_what_belongs_there_is_committed() -> None:
    """Neither what a try has left at the root nor a link to an environment; without git there is nothing to look at."""
    if not (ROOT / ".git").exists():
        return
    told = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = [line.partition("\t") for line in told.splitlines()]
    folders = {path.partition("/")[0] for _, _, path in listed if "/" in path}
    beside = {".ci", ".github", "benchmarks", "docs", "examples", "sbpflow", "tests", "tools"}
    assert folders == {*FLOORS, *beside}
    assert {path for how, _, path in listed if how.startswith("120000")} == {
        f"sbpflow/{room}" for room in (*FLOORS, "examples")
    }


def test_the_floors_allow_the_arrows() -> None:
    assert all(FLOORS.index(low) < FLOORS.index(high) for high, low in ARROWS)


def test_rooms_import_along_the_known_arrows_only() -> None:
    drawn = {
        (path.parts[0], found.target.split(".")[0]) for path in ROOM_CODE for found in imports(path) if found.level
    }
    assert {(src, dst) for src, dst in drawn if src != dst} == ARROWS


def test_no_module_imports_itself_through_others() -> None:
    """Not even in a function, for typing or by string."""
    TopologicalSorter(arrows()).prepare()  # raises CycleError with the modules of the circle


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("importlib.import_module('.book', __package__)", ["sbp.book"]),
        ("__import__('sbpflow.sbp.book')", ["sbpflow.sbp.book"]),
        ("import_module('scipy.optimize')", ["scipy.optimize"]),
        ("import_module(name)", []),
    ],
)
def test_an_import_by_string_is_seen(text: str, targets: list[str]) -> None:
    assert [found.target for found in imports_in(ast.parse(text), Path("sbp/registry.py"))] == targets


def test_an_import_of_all_modules_beside_is_seen() -> None:
    text = "for each in iter_modules(__path__):\n    import_module(f'.{each.name}', __name__)"
    targets = [found.target for found in imports_in(ast.parse(text), Path("sbp/book/windows/__init__.py"))]
    assert "sbp.book.windows.reach" in targets
    assert len(targets) == 7


def test_no_folder_imports_itself_through_others() -> None:
    TopologicalSorter(joined(arrows(), units(arrows()))).prepare()


def test_the_core_imports_nothing_of_the_ring() -> None:
    assert all((ROOT / room).exists() for room in RING)
    assert ring_imports() == []


def test_the_map_names_the_folders_from_the_ground_up() -> None:
    house = {
        "sbp": {"sbp.call"},
        "sbp.check": {"sbp.joint.plan", "sbp.book.views"},
        "sbp.call": set(),
        "sbp.book": {"sbp.book.views"},
        "sbp.book.views": {"sbp.call"},
        "sbp.joint": set(),
        "sbp.joint.plan": {"sbp.book", "sbp.call"},
        "nn": {"sbp"},
    }
    assert map_of(house).splitlines() == [
        "sbp/book               1  sbp/call",
        "sbp/joint              1  sbp/book",
        "sbp                    2  sbp/joint",
        "nn                     0  sbp",
    ]
    lines = map_of(arrows()).splitlines()
    assert len(lines) <= 72
    assert all(line.split()[1].isdigit() for line in lines)  # a blank behind the longest names, too


def test_a_folder_has_at_most_sixteen_modules() -> None:
    modules = [path for path in ALL_CODE if path.name != "__init__.py" and path.parts[0] != "tests"]
    many = Counter(path.parent.as_posix() for path in modules)
    assert {folder: count for folder, count in many.items() if count > 16} == {}


def named_by(node: ast.AST) -> Iterator[str]:
    """The name that it gives to a type."""
    if isinstance(node, ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        yield ast.unparse(node.target)


def test_the_name_of_a_class_or_type_stands_for_one_thing() -> None:
    """But for those that stand for the same thing in two graphs, as the nouns of docs/concepts.md say."""
    names = Counter(name for path in ROOM_CODE for node in ast.walk(tree(path)) for name in named_by(node))
    twice = {name for name, count in names.items() if count > 1}
    assert twice == {"Source"}
    nouns = (ROOT / "docs/concepts.md").read_text().partition("## The nouns")[2]
    assert {noun.capitalize() for noun in re.findall(r"^\| (\w+) \|", nouns, re.MULTILINE)} >= twice


def test_the_map_in_the_docs_is_that_of_the_house() -> None:
    assert f"```text\n{map_of(arrows())}\n```" in (ROOT / "docs/inside.md").read_text(), (
        "python tools/house.py prints it"
    )


def foreign(path: Path) -> set[str]:
    """The imports of a file by a name that is not ours to use: a room's, and in the rooms the facade's."""
    forbidden = {*FLOORS, "sbpflow"} if path in ROOM_CODE else {*FLOORS}
    return {found.target for found in imports(path) if not found.level and found.target.split(".")[0] in forbidden}


def test_rooms_are_imported_under_one_name() -> None:
    """`import sbp` would make a second copy of every class; a room importing the facade closes a circle."""
    assert {path.as_posix(): names for path in ALL_CODE if (names := foreign(path))} == {}


def test_a_file_is_short() -> None:
    scripts = [path.relative_to(ROOT) for room in FLOORS for path in files(room) if path.parent.name == "static"]
    lines = {path.as_posix(): len((ROOT / path).read_text().splitlines()) for path in (*ROOM_CODE, *scripts)}
    assert {path: count for path, count in lines.items() if count > 400} == {}


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_lines(module: ast.Module) -> list[str]:
    """Of each docstring in a file."""
    nodes = [node for node in ast.walk(module) if isinstance(node, DOCUMENTED)]
    return [text.partition("\n")[0] for node in nodes if (text := ast.get_docstring(node))]


def test_a_file_says_what_it_is_for_and_the_first_line_of_a_docstring_names_its_subject() -> None:
    for path in ROOM_CODE:
        module = tree(path)
        assert ast.get_docstring(module), path
        assert [line for line in first_lines(module) if re.match(r"(What|Who|Which)\b", line)] == [], path


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
    told = [path for path in tests if any(map(tells_time, ast.walk(tree(path))))]
    # The first is about clocks that forwards read, the second ends workers that do not answer.
    clocks = "tests/nn/graph/capture/surroundings/test_clocks.py"
    assert [path.as_posix() for path in told] == [clocks, "tests/nn/oppool.py"]


MAKE = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
MAKE |= {"scalar_tensor", "tensor", "zeros"}


def test_no_tensor_of_ours_lies_where_a_program_has_set_its_default_device() -> None:
    found = [
        f"{path.as_posix()}: {ast.unparse(node)}"
        for path in ROOM_CODE
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).removeprefix("torch.") in MAKE
        and ast.unparse(node.func).startswith("torch.")
        and not {"device", None} & {each.arg for each in node.keywords}
    ]
    assert found == ["nn/tensors/factories.py: torch.tensor(data)"]  # what a program hands to flow.tensor


@pytest.mark.parametrize("name", ["sbpflow", *(f"sbpflow.{room}" for room in FLOORS)])
def test_every_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__
    assert not [public for public in module.__all__ if not hasattr(module, public)]


def test_nothing_is_exported_twice() -> None:
    names = [(room, name) for room in ("", ".nn", ".boxing", ".actors", ".sbp") for name in exported(f"sbpflow{room}")]
    twice = Counter(name for _, name in names)
    assert [(room, name) for room, name in names if twice[name] > 1] == []


def exported(name: str) -> list[str]:
    return list(importlib.import_module(name).__all__)


def test_the_core_needs_four_packages() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[\[<>=!~; ]", need)[0] for need in needs} == {"torch", "numpy", "lark", "graphviz"}


LOADED = "import sys, sbpflow; sbpflow.placement('cpu', [0]); print(sbpflow.__file__, *SLOW & {*sys.modules})"
SLOW = {"lark", "sympy", "torch._dynamo"}


def test_the_wheel_holds_only_sbpflow_and_loads_nothing_slow_before_it_is_needed(tmp_path: Path) -> None:
    # Built from a copy: setuptools takes up what an earlier build left in the tree, and leaves more.
    clutter = shutil.ignore_patterns(".*", "build", "dist", "out", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=clutter)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not re.match(r"sbpflow-[^/]+\.dist-info/", name)}
    rooms = {f"sbpflow/{path.relative_to(ROOT)}" for room in FLOORS for path in files(room)}
    shown = {f"sbpflow/{path.relative_to(tree)}" for path in (tree / "examples").rglob("*") if path.is_file()}
    assert held == rooms | shown | {
        "sbpflow/__init__.py",
        "sbpflow/__main__.py",
        "sbpflow/_interrupt.py",
        "sbpflow/py.typed",
    }

    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    load = [sys.executable, "-c", LOADED.replace("SLOW", str(SLOW))]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(["", *filter(None, sys.path)])}
    loaded = subprocess.run(load, cwd=tmp_path / "site", env=there, capture_output=True, text=True, check=True).stdout
    assert Path(loaded.rstrip("\n")) == tmp_path / "site" / "sbpflow" / "__init__.py"
