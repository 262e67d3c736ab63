"""Structures: lists, tuples, mappings and dataclasses around values, as functions take and return them.

Whatever looks into one asks `parts` what is in it, so that all find the same in the same places:

    list, tuple   by position, in named tuples and torch's results too
    mapping       by key; what it is besides, such as a default or an order, stays with it
    dataclass     by field, if it is frozen too
    object        by attribute, where `objects` says so

What is put together of other parts is of the same class. Lists, tuples and mappings are always made anew; a dataclass
or an object stays itself as long as nothing in it is replaced.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ATOMS", "ByIdentity", "is_simple", "leaves", "mapped", "part_at", "parts", "replaced", "walk"]

# What has no parts, whatever hangs at it.
_OPAQUE = (Tensor, nn.Module, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
ATOMS = {
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout
}  # fmt: skip
_OURS = __name__.removesuffix("placement.structure")  # whose dataclasses, such as layouts in a call, are values
Change = Callable[[str, Any], Any]


class ByIdentity:
    """An object as something to compare or a key: it equals itself alone. It is held, because another that is made
    later could lie where it was, and be taken for it.

    >>> one = [1]
    >>> ByIdentity(one) == ByIdentity(one), ByIdentity(one) == ByIdentity([1])
    (True, False)
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def parts(value: Any, *, objects: bool = False) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a structure, each behind its position, key or name; None of what is no structure.

    >>> list(parts(["a", "b"])), list(parts({"k": 1})), parts("a")
    ([(0, 'a'), (1, 'b')], [('k', 1)], None)
    """
    if type(value) in ATOMS:
        return None
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, _OPAQUE):
        return None
    held = getattr(value, "__dict__", {})
    if dataclasses.is_dataclass(value) and not type(value).__module__.startswith(_OURS):
        names = [field.name for field in dataclasses.fields(value)]
        return ({name: getattr(value, name) for name in names if hasattr(value, name)} | held).items()
    return held.items() if objects and held else None


def part_at(value: Any, key: Any) -> Any:
    """The part of a structure behind a position, key or name."""
    return value[key] if isinstance(value, list | tuple | Mapping) else getattr(value, key)


def leaves(value: Any, kind: Any) -> list[Any]:
    """The leaves of this kind (or of these) in a structure, in order.

    >>> leaves(([1, "x"], {"k": 2}), int)
    [1, 2]
    """
    if isinstance(value, kind):
        return [value]
    of = type(value)
    if of in ATOMS:
        return []
    if of is list or of is tuple:  # calls of ATen are made of these, and there are very many
        return [leaf for part in value for leaf in leaves(part, kind)]
    return [leaf for _, leaf in walk(value, kind)]


def walk(
    value: Any, kind: Any, keys: tuple[Any, ...] = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves of a kind, each behind the keys that lead to it; without a kind all that have no parts.

    >>> list(walk({"x": [7, "a"]}, int)), list(walk({"x": [7, "a"]}, None))
    ([(('x', 0), 7)], [(('x', 0), 7), (('x', 1), 'a')])
    """
    if kind is not None and isinstance(value, kind):
        yield keys, value
        return
    inside = parts(value)
    if inside is None and kind is None:
        yield keys, value
    if inside is None or id(value) in around:  # it is in itself
        return
    for key, part in inside:
        yield from walk(part, kind, (*keys, key), (*around, id(value)))


def mapped(value: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """The structure with all that is of this kind (or of these) in it replaced.

    >>> mapped([1, ("x", 2)], int, str)
    ['1', ('x', '2')]
    """
    if isinstance(value, kind):
        return change(value)
    of = type(value)
    if of in ATOMS:
        return value
    if of is tuple:
        return tuple([mapped(part, kind, change) for part in value])
    if of is list:
        return [mapped(part, kind, change) for part in value]
    if of is dict:
        return {name: mapped(part, kind, change) for name, part in value.items()}
    return replaced(value, lambda _, leaf: change(leaf), kind=kind)


def replaced(value: Any, change: Change, path: str = "", *, objects: bool = False, kind: Any = Tensor) -> Any:
    """The structure with each leaf of a kind, by default tensors, replaced by `change(path, leaf)`. With `objects`
    leaves in attributes count too; the kind None is all that has no parts.

    >>> replaced({"x": [torch.ones(1), 2]}, lambda path, x: path)
    {'x': ['x.0', 2]}
    """
    return _Replacing(change, objects, kind).visit(value, path)


def is_simple(value: Any) -> bool:
    """Whether a structure is made of plain lists, tuples and dicts around tensors and atoms."""
    if type(value) in (list, tuple):
        return all(map(is_simple, value))
    if type(value) is dict:
        return all(map(is_simple, value.values()))
    return isinstance(value, Tensor | str | bytes | int | float | complex | bool | None)


class _Replacing:
    def __init__(self, change: Change, objects: bool, kind: Any) -> None:
        self.change, self.objects, self.kind = change, objects, kind
        self.known: dict[int, tuple[Any, Any]] = {}  # an object may be in several places, or in itself
        self.count = 0  # what is another now

    def visit(self, value: Any, path: str) -> Any:
        if self.kind is not None and isinstance(value, self.kind):
            return self._leaf(value, path)
        inside = parts(value, objects=self.objects)
        if inside is None:
            return value if self.kind is not None else self._leaf(value, path)
        if isinstance(value, list | tuple | Mapping):
            return _container(value, {key: self.visit(part, _join(path, key)) for key, part in inside})
        return self._object(value, path, dict(inside))

    def _leaf(self, value: Any, path: str) -> Any:
        made = self.change(path, value)
        self.count += made is not value
        return made

    def _object(self, value: Any, path: str, inside: dict[str, Any]) -> Any:
        if id(value) not in self.known:
            made, before = copy.copy(value), self.count
            self.known[id(value)] = value, made
            for name, part in inside.items():
                if (other := self.visit(part, _join(path, name))) is not part:
                    object.__setattr__(made, name, other)  # a frozen one has no other way
            if self.count == before:
                self.known[id(value)] = value, value  # nothing in it but what it was
        found = self.known[id(value)][1]
        self.count += found is not value
        return found


def _container(value: Any, made: dict[Any, Any]) -> Any:
    """A list, tuple or mapping of the same class around other parts."""
    kind: Any = type(value)
    if kind is dict:
        return made
    if isinstance(value, tuple):  # torch's results take one sequence, as tuples do
        return kind._make(made.values()) if hasattr(kind, "_make") else kind(list(made.values()))
    if dataclasses.is_dataclass(value):  # transformers' outputs are dicts and dataclasses at once
        return kind(**made)
    if not hasattr(kind, "__setitem__"):
        return kind(made)
    copied = copy.copy(value)
    for key, part in made.items():
        copied[key] = part
    return copied


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
