"""Structures around tensors, as functions take and return them: the same with others in their place."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["is_simple", "replaced"]

_OPAQUE = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
Change = Callable[[str, Any], Any]


def replaced(value: Any, change: Change, path: str = "", *, objects: bool = False, kind: type = Tensor) -> Any:
    """The structure with every tensor replaced by `change(path, tensor)`; with `objects` also those in attributes. With
    another `kind` that is replaced, and tensors stay.

    Classes are kept, as those of named tuples, dataclasses and transformers' outputs.

    >>> import torch
    >>> replaced({"x": [torch.ones(1), 2]}, lambda path, x: path)
    {'x': ['x.0', 2]}
    """
    return _Replacing(change, objects, kind).visit(value, path)


def is_simple(value: Any) -> bool:
    """Whether a structure is made of plain lists, tuples and dicts, as `fill` puts together again."""
    if type(value) in (list, tuple):
        return all(map(is_simple, value))
    if type(value) is dict:
        return all(map(is_simple, value.values()))
    return isinstance(value, Tensor | str | bytes | int | float | complex | bool | None)


class _Replacing:
    def __init__(self, change: Change, objects: bool, kind: type) -> None:
        self.change, self.objects, self.kind = change, objects, kind
        self.known: dict[int, tuple[Any, Any]] = {}  # an object may be in several places, or in itself

    def visit(self, value: Any, path: str) -> Any:
        if isinstance(value, self.kind):
            return self.change(path, value)
        if isinstance(value, tuple):
            parts = [self.visit(part, _join(path, at)) for at, part in enumerate(value)]
            if type(value) is tuple:
                return tuple(parts)
            kind: Any = type(value)
            return kind(*parts) if hasattr(kind, "_make") else kind(parts)
        if type(value) is list:
            return [self.visit(part, _join(path, at)) for at, part in enumerate(value)]
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        return self._object(value, path) if self.objects else value

    def _mapping(self, value: Any, path: str) -> Any:
        parts = {name: self.visit(part, _join(path, name)) for name, part in value.items()}
        if type(value) is dict:
            return parts
        if dataclasses.is_dataclass(value):  # transformers' outputs are dicts and dataclasses at once
            kind: Any = type(value)
            return kind(**parts)
        made = copy.copy(value)
        for name, part in parts.items():
            made[name] = part
        return made

    def _object(self, value: Any, path: str) -> Any:
        attributes = getattr(value, "__dict__", None)
        if not attributes or isinstance(value, _OPAQUE):
            return value
        known = self.known.get(id(value))
        if known is None:
            made = copy.copy(value)
            self.known[id(value)] = known = value, made
            changed = {name: self.visit(part, _join(path, name)) for name, part in attributes.items()}
            if all(changed[name] is part for name, part in attributes.items()):
                self.known[id(value)] = known = value, value  # nothing in it but what it was
            else:
                made.__dict__.update(changed)
        return known[1]


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
