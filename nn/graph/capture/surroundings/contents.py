"""Contents of containers: what is in a dict, list, set, deque, cell, class or object, and how it is put back.

Everything is read and written as the built-in type does it, because a subclass may refuse, such as a frozen dict, or do
more.
"""

import copyreg
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from torch import Tensor

__all__ = ["Content", "attributes_of", "beside", "inner", "kind_of"]

Content = list[tuple[Any, Any]]  # by key or name; lists and sets have None there

_BUILT_IN = frozenset({"builtins", "collections"})  # what these have besides their content is of no program
_ABSENT = object()


@dataclass(frozen=True, eq=False)
class ContainerKind:
    """A kind of containers. `put(container, now, wanted)` writes where the two differ."""

    read: Callable[[Any], Content]
    put: Callable[[Any, Content, Content], None]
    keyed: bool = True  # whether entries have names, so that one can be put back without the others


def kind_of(value: Any) -> ContainerKind | None:
    """The kind of a container: how it is read and written. None if it holds nothing, or nothing that could be put
    back."""
    cls = type(value)
    return _KINDS.get(cls) or next((_KINDS[base] for base in cls.__mro__ if base in _KINDS), None)


def attributes_of(value: Any) -> list[Any]:
    """The containers that hold the attributes of an object: its dict, and slots, if it has any."""
    cls = type(value)
    if cls.__module__ in _BUILT_IN or isinstance(value, Tensor | type | ModuleType | MethodType | MappingProxyType):
        return []
    found: list[Any] = []
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # there is none, or a property of this name raises
        held = None
    if isinstance(held, dict):
        found.append(held)
    if any("__slots__" in vars(base) for base in cls.__mro__) and (names := copyreg._slotnames(cls)):  # type: ignore[attr-defined]
        found.append(Slots(value, tuple(names)))
    return found


def inner(value: Any) -> list[Any]:
    """The parts of a value that cannot be written to: those of a tuple, the arguments of a partial."""
    if isinstance(value, tuple | frozenset):
        return list(value)
    return [value.func, value.args, value.keywords] if isinstance(value, partial) else []


def beside(value: Any) -> list[Any]:
    """All that a function or method goes by besides its arguments."""
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget]
    return [value.__wrapped__] if isinstance(value, _lru_cache_wrapper) else []


class Slots:
    """The attributes that an object has in slots."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self.owner, self.names = owner, names


# Reading and writing, one pair for each kind


def _put_dict(base: Any) -> Callable[[Any, Content, Content], None]:
    def put(held: Any, now: Content, wanted: Content) -> None:
        keys = {id(key) for key, _ in wanted}
        before = {id(key): value for key, value in now}
        for key, _ in now:
            if id(key) not in keys:
                base.__delitem__(held, key)
        for key, value in wanted:
            if before.get(id(key), _ABSENT) is not value:
                base.__setitem__(held, key, value)
        if [id(key) for key in base.keys(held)] != [id(key) for key, _ in wanted]:  # the order of parameters counts
            base.clear(held)
            for key, value in wanted:
                base.__setitem__(held, key, value)

    return put


def _values(held: Any) -> Content:
    return [(None, value) for value in list(held)]


def _put_list(held: Any, now: Content, wanted: Content) -> None:
    list.__setitem__(held, slice(None), [value for _, value in wanted])


def _put_deque(held: Any, now: Content, wanted: Content) -> None:
    deque.clear(held)
    deque.extend(held, [value for _, value in wanted])


def _put_set(held: Any, now: Content, wanted: Content) -> None:
    set.clear(held)
    set.update(held, [value for _, value in wanted])


def _cell(held: CellType) -> Content:
    try:
        return [("", held.cell_contents)]
    except ValueError:  # nothing is in it
        return []


def _put_cell(held: CellType, now: Content, wanted: Content) -> None:
    if wanted:
        held.cell_contents = wanted[0][1]
    else:
        del held.cell_contents


def _slots(held: Slots) -> Content:
    found = ((name, _get(held.owner, name)) for name in held.names)
    return [(name, value) for name, value in found if value is not _ABSENT]


def _get(owner: Any, name: str) -> Any:
    try:
        return object.__getattribute__(owner, name)
    except Exception:
        return _ABSENT


def _put_attributes(base: Any, owner: Any, now: Content, wanted: Content) -> None:
    after, before = dict(wanted), dict(now)
    for name in before.keys() - after.keys():
        base.__delattr__(owner, name)
    for name, value in after.items():
        if before.get(name, _ABSENT) is not value:
            base.__setattr__(owner, name, value)


def _put_slots(held: Slots, now: Content, wanted: Content) -> None:
    _put_attributes(object, held.owner, now, wanted)


def _put_class(held: type, now: Content, wanted: Content) -> None:
    _put_attributes(type, held, now, wanted)


_KINDS: dict[type, ContainerKind] = {
    OrderedDict: ContainerKind(lambda held: list(OrderedDict.items(held)), _put_dict(OrderedDict)),
    dict: ContainerKind(lambda held: list(dict.items(held)), _put_dict(dict)),
    list: ContainerKind(_values, _put_list, keyed=False),
    deque: ContainerKind(_values, _put_deque, keyed=False),
    set: ContainerKind(_values, _put_set, keyed=False),
    CellType: ContainerKind(_cell, _put_cell),
    Slots: ContainerKind(_slots, _put_slots),
    type: ContainerKind(lambda held: list(vars(held).items()), _put_class),
}
