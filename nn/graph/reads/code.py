"""The names that a function takes from around it, and whose code it is."""

import dis
import sys
import sysconfig
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

__all__ = ["CodeNames", "foreign", "installed", "module_of", "names_in"]

_LIBRARY = (str(Path(torch.__file__).resolve().parent), sysconfig.get_paths()["stdlib"])
_INSTALLED = tuple({sysconfig.get_paths()[each] for each in ("purelib", "platlib")})
_OURS = ("torch", "sbpflow", "numpy", "builtins")  # and what is named after these
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


class CodeNames(NamedTuple):
    """The globals that code reads, attributes that it reads of anything, and modules that it imports as it runs.
    `handed` globals go to others, which may read attributes of them that are not named here."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imported: frozenset[str]
    handed: frozenset[str]


@lru_cache(4096)
def names_in(code: CodeType) -> CodeNames:
    """The names that a function's code uses, with those of functions inside of it."""
    steps = list(dis.get_instructions(code))
    found = {str(step.argval) for step in steps if step.opname in _GLOBALS}
    handed = {
        str(step.argval)
        for step, after in pairwise(steps)
        if step.opname in _GLOBALS and "ATTR" not in after.opname and "METHOD" not in after.opname
    }
    imported = {str(step.argval) for step in steps if step.opname == "IMPORT_NAME"}
    attributes = {str(step.argval) for step in steps if "ATTR" in step.opname or "METHOD" in step.opname}
    attributes |= {str(step.argval) for step in steps if step.opname == "IMPORT_FROM"}
    for inner in (names_in(part) for part in code.co_consts if isinstance(part, CodeType)):
        found, attributes, imported = found | inner.globals, attributes | inner.attributes, imported | inner.imported
        handed |= inner.handed
    return CodeNames(frozenset(found), frozenset(attributes), frozenset(imported), frozenset(handed))


def foreign(of: Any) -> bool:
    """Whether a function, class or module is of Python's library, torch or this package: nothing that users edit."""
    if isinstance(of, FunctionType):
        return _foreign(module_of(of), of.__code__.co_filename)
    return _foreign(module_of(of), _file_of(of))


def module_of(of: Any) -> str:
    """The name of the Python module that a function, class or module belongs to."""
    if isinstance(of, FunctionType):
        return str(of.__globals__.get("__name__"))
    return of.__name__ if isinstance(of, ModuleType) else str(getattr(of, "__module__", None))


def installed(of: Any) -> bool:
    """Whether it came with a package that was installed, such as transformers."""
    return (of.__code__.co_filename if isinstance(of, FunctionType) else _file_of(of)).startswith(_INSTALLED)


def _file_of(of: Any) -> str:
    return str(getattr(sys.modules.get(module_of(of)), "__file__", ""))


@lru_cache(4096)
def _foreign(name: str, path: str) -> bool:
    if name.partition(".")[0] in _OURS:
        return True
    return path.startswith(_LIBRARY) and (path.startswith(_LIBRARY[0]) or not path.startswith(_INSTALLED))
