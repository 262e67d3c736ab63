"""The map of the house: its folders from the ground up, and the arrows of imports between them.

    python tools/house.py     the map, a line a folder: how many modules it has, and whom they import

Every import counts, also those in functions and under TYPE_CHECKING. tests/test_house.py holds the house to it.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

__all__ = ["FLOORS", "ROOM_CODE", "ROOT", "arrows", "files", "imports", "joined", "map_of", "units"]

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("placement", "sbp", "boxing", "actors", "nn")  # lowest first
DATA = {".py", ".lark", ".rules", ".toml"}

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
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file."""
    return tuple(imports_in(ast.parse((ROOT / path).read_text()), path))


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

    Of its own room those are left out that it imports through others. Of a folder that imports this one in turn, the
    modules are named.
    """
    inside = folders(of)
    between = joined(of, inside)
    for folder in between:
        for above in [each for each in between[folder] if folder.startswith(f"{each}.")]:
            if folder in between[above]:
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
        lines.append(f"{name.replace('.', '/'):<22}{many:>2}  {listed}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    print(map_of(arrows()))
