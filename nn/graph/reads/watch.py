"""The watch: while a step is captured it notes which attributes are read of modules and of other objects, by class.

Layers that were not traced because they are like one that was are read alike, so that it goes by class.
"""

import dataclasses
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..capture.repeats.likeness import ALL, attributes_noted, read_name
from .code import foreign

__all__ = ["AttributeReads", "building", "is_data", "reading"]

AttributeReads = dict[type, set[str]]  # of attributes that were read, by class; `ALL` where somebody had a whole dict

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code has made
_OTHER = (nn.Module, Tensor, Optimizer, ModuleType, Enum, type)
_building = 0
object_dict: Any = nn.Module.__dict__["__dict__"].__get__  # which asks no class for it


def building() -> bool:
    """Whether some graph is being captured right now."""
    return _building > 0


def is_data(value: Any) -> bool:
    """Whether a value is an object of somebody's class, with attributes that code may go by."""
    kind = type(value)
    if not kind.__flags__ & _HEAP or isinstance(value, _OTHER):
        return False
    return kind is Namespace or dataclasses.is_dataclass(kind) or not foreign(kind)


@contextmanager
def reading(
    names: AttributeReads, *classes: type, roots: Iterable[Any] = (), lacked: set[tuple[int, str]] | None = None
) -> Iterator[None]:
    """Note the attributes that are read of instances of these classes, and of objects among `roots` or out of such
    reads. In `lacked`, by identity and name, come those of modules that were asked for while there was no tensor and
    that the program had not set itself. `ALL` is the name where somebody had the whole dict."""
    global _building
    watched = set(classes)
    written: set[tuple[int, str]] = set()
    seen: dict[int, Any] = {}  # containers and objects that were looked into, which live as long as their ids count

    def note(owner: Any, name: str) -> None:
        named = read_name(name)
        if named is not None:
            names.setdefault(type(owner), set()).add(named)
            if lacked is not None and issubclass(type(owner), nn.Module):
                key = id(owner), named
                if name == "__dict__" and named != ALL:  # torch is about to set it, or has looked for it already
                    written.update({key} - lacked)
                elif key not in written and not issubclass(type(object_dict(owner).get(named)), Tensor):
                    lacked.add(key)

    def found(value: Any) -> None:
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen[id(value)] = value
            for part in list(value.values()) if isinstance(value, dict) else value:
                found(part)
        elif type(value) not in watched and is_data(value):
            watched.add(type(value))
            names.setdefault(type(value), set()).update(() if watch(type(value)) else (ALL,))

    _building += 1
    try:
        with attributes_noted(classes, note, found) as watch:
            for root in roots:
                found(root)
            yield
    finally:
        _building -= 1
