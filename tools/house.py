"""The map of the house: its folders from the ground up, and the arrows of imports between them.

    python tools/house.py     the map, a line a folder: how many modules it has, and whom they import;
                              then the lines of core and ring, and how many imports of the ring the core has

Every import counts, also those in functions, under TYPE_CHECKING and by string. tests/test_house.py holds the house to
it.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

__all__ = [
    "FLOORS", "RING", "ROOM_CODE", "ROOT", "arrows", "files", "imports", "imports_in", "in_ring", "joined", "map_of",
    "ring_imports", "tree", "units",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("placement", "sbp", "boxing", "actors", "nn")  # lowest first
# Rooms that read plans, write files, draw, search, encode or train without a flush: the core imports none of them.
RING = (
    "boxing/demo.py", "boxing/encoders", "boxing/graph/picture", "boxing/graph/report",
    "boxing/graph/text/parse.py", "boxing/graph/text/syntax.py", "boxing/picture",
    "actors/added", "actors/schedules/search", "actors/timeline",
    "nn/added", "nn/asynchronous", "nn/checkpoint", "nn/composites", "nn/data", "nn/explanations", "nn/files",
    "nn/generation", "nn/islands", "nn/plan", "nn/refit", "nn/watching",
)  # fmt: skip
DATA = {".py", ".lark", ".rules", ".toml", ".js", ".css", ".txt"}

BY_STRING = {"import_module", "__import__"}

Arrows: TypeAlias = Mapping[str, set[str]]  # a module, and those that it imports


def files(room: str) -> list[Path]:
    return [path for path in sorted((ROOT / room).rglob("*")) if path.is_file() and path.suffix in DATA]


ROOM_CODE = [path.relative_to(ROOT) for room in FLOORS for path in files(room) if path.suffix == ".py"]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name as a dotted path from the root of the house."""

    level: int
    target: str


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file."""
    return tuple(imports_in(tree(path), path))


def imports_in(tree: ast.Module, path: Path) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(0, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from .grid import Placement`: the name may be a module or something in it; `arrows` decides.
            package = path.parent.parts[: len(path.parent.parts) - node.level + 1] if node.level else ()
            for name in node.names:
                parts = (*package, *(node.module or "").split("."), name.name)
                yield Import(node.level, ".".join(filter(None, parts)))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_STRING and node.args:
            yield from by_string(node.args[0], path)


def by_string(name: ast.expr, path: Path) -> Iterator[Import]:
    """The imports of an `import_module(name)`: a module, or all of the file's folder where the name begins with a dot
    and is put together only as it runs. A name of which nothing is known, such as one that a user gives, is none."""
    if isinstance(name, ast.Constant) and isinstance(name.value, str):
        bare = name.value.lstrip(".")
        level = len(name.value) - len(bare)
        package = path.parent.parts[: len(path.parent.parts) - level + 1] if level else ()
        yield Import(level, ".".join((*package, bare)))
    elif ast.unparse(name).startswith(("f'.{", 'f".{')):
        names = {module_of(each) for each in ROOM_CODE}
        yield from (Import(1, name) for name in names if name.rpartition(".")[0] == module_of(path))


@cache
def arrows() -> Arrows:
    """Of each module of the rooms, which others of them it imports."""
    modules = {module_of(path) for path in ROOM_CODE}
    found: dict[str, set[str]] = {}
    for path in ROOM_CODE:
        targets = {each.target for each in imports(path) if each.level}
        found[module_of(path)] = {name if name in modules else name.rpartition(".")[0] for name in targets}
    return {module: targets - {module} for module, targets in found.items()}


def folders(of: Arrows) -> dict[str, str]:
    """The folder of each module; that of an `__init__` is its own."""
    inner = {module.rpartition(".")[0] for module in of}
    return {module: module if module in inner or "." not in module else module.rpartition(".")[0] for module in of}


def joined(of: Arrows, name: Mapping[str, str]) -> dict[str, set[str]]:
    """The arrows between groups of modules, by the name of each one's group."""
    found: dict[str, set[str]] = {name[module]: set() for module in of}
    for module, targets in of.items():
        found[name[module]] |= {name[target] for target in targets} - {name[module]}
    return found


def units(of: Arrows) -> dict[str, str]:
    """The folder of each module; one that lies beside sub-folders, above some and below others, is by itself."""
    inside = folders(of)
    mixed = {folder.rpartition(".")[0] for folder in inside.values()}
    return {module: module if folder in mixed else folder for module, folder in inside.items()}


def reached(of: Arrows, start: str) -> set[str]:
    """All that a group imports, itself or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        more = of[left.pop()] - found
        found |= more
        left += more
    return found


def map_of(of: Arrows) -> str:
    """The folders from the ground up: how many modules each has, the rooms below that it imports, and which folders.

    Of its own room those are left out that it imports through others. Of one above that imports this one in turn, the
    modules are named.
    """
    inside = folders(of)
    whole, between = joined(of, inside), joined(of, inside)
    for folder in between:
        for above in [each for each in between[folder] if folder.startswith(f"{each}.")]:
            if folder in reached(whole, above):
                mine = (of[module] for module in of if inside[module] == folder)
                between[folder] |= {module for targets in mine for module in targets if inside[module] == above}
                between[folder] -= {above}
    between |= {module: set() for targets in [*between.values()] for module in targets if module not in between}
    depth: dict[str, int] = {}
    for name in TopologicalSorter(between).static_order():
        depth[name] = 1 + max((depth[below] for below in between[name]), default=0)
    lines = []
    for name in sorted({*inside.values()}, key=lambda name: (FLOORS.index(name.split(".")[0]), depth[name], name)):
        room = name.split(".")[0]
        own = {each for each in between[name] if each.split(".")[0] == room}
        own -= {far for far in own for near in own if far in reached(between, near)}
        rooms = {each.split(".")[0] for each in between[name]}
        others = [each for each in FLOORS if each != room and each in rooms]
        many = sum(folder == name for folder in inside.values()) - 1
        listed = ", ".join([*others, *sorted(own)]).replace(".", "/")
        lines.append(f"{name.replace('.', '/'):<21} {many:>2}  {listed}".rstrip())
    return "\n".join(lines)


def in_ring(path: Path) -> bool:
    return any(path.is_relative_to(room) for room in RING)


def is_face(path: Path) -> bool:
    """Whether it only hands names on, so that what it imports is not what the core needs."""
    return path.name == "__init__.py" and not any(
        isinstance(each, ast.FunctionDef | ast.For) for each in tree(path).body
    )


def ring_imports() -> list[str]:
    """The imports of the ring by the core, as `module -> module`."""
    ring = {module_of(path) for path in ROOM_CODE if in_ring(path)}
    core = [module_of(path) for path in ROOM_CODE if not in_ring(path) and not is_face(path)]
    return sorted(f"{module} -> {target}" for module in core for target in arrows()[module] & ring)


def sizes() -> str:
    """How large core and ring are, and what still ties them."""
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in ROOM_CODE}
    ring = sum(count for path, count in lines.items() if in_ring(path))
    core = sum(lines.values()) - ring
    return f"core {core:,} lines, with {len(ring_imports())} imports of the ring; ring {ring:,} lines"


if __name__ == "__main__":
    print(map_of(arrows()))
    print(sizes())
