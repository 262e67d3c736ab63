"""The walk from a graph, its modules and the functions that they run to all values that these were in reach of.

module      its class, children, hooks, the attributes that were read of it; what methods and hooks are in reach of
function    its code and defaults, the cells that it closes over, the globals and parts of modules that it names
container   each of its parts
object      the attributes that were read of it; all where its class could not be watched

In installed packages, such as transformers, only the files of the model's classes are walked: the values that they name
are guarded too, and nothing that lies behind those.
"""

import sys
from collections import UserDict, UserList, deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from ....placement.structure import ByIdentity
from ...model.slots import joined_path
from ..capture.repeats.likeness import ALL
from ..capture.surroundings.clocks import names_clock
from .code import foreign, installed, module_of, names_in
from .guard import PLAIN, ReadGuard, global_hooks, hooked
from .watch import AttributeReads, is_data

__all__ = ["InReach", "around", "guarded"]

HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_MACHINERY = frozenset({*vars(nn.Module()), *vars(nn.Module), *dir(object)} - {"forward"})
_TABLES = ("_parameters", "_buffers", "_modules")
_ROOTS = (nn.Module, object)
_NAMED = (FunctionType, type, ModuleType, staticmethod, classmethod, property)


class InReach(NamedTuple):
    """Things in reach of a graph's and its modules' functions: objects with attributes, and whether they name clocks or
    the system's chance."""

    objects: list[Any]
    clocks: bool


def around(graph: Any, modules: Mapping[str, nn.Module]) -> InReach:
    """Things in reach before anything is captured."""
    walk = _Walk(ReadGuard(), None, modules)
    for cls in dict.fromkeys(type(part) for root in modules.values() for part in root.modules()):
        walk.value(cls, cls.__name__)
    for part in (part for root in modules.values() for part in root.modules()):
        for name in (*HOOKS, "forward"):
            walk.value(vars(part).get(name), name)
        for name, value in list(vars(part).items()):
            if isinstance(value, FunctionType | MethodType | partial):
                walk.value(value, name)
    for hook in global_hooks():
        walk.value(hook, "a hook of all modules")
    if graph is not None:
        walk.value(type(graph), "the graph")
        walk.value(getattr(graph, "loss", None), "the loss function")
    return InReach(walk.objects, walk.clocks)


def guarded(
    graph: Any,
    modules: Mapping[str, nn.Module],
    names: AttributeReads,
    before: Mapping[tuple[ByIdentity, Any], Any] | None = None,
) -> ReadGuard:
    """A guard of all values that a capture of this graph may have read, as they are now.

    `names` are the attributes that it read; `before` has the numbers that it changed itself, as they were."""
    guard = ReadGuard(before)
    walk = _Walk(guard, names, modules)
    for prefix, root in modules.items():
        for path, module in root.named_modules(prefix=prefix):
            walk.module(module, path)
    for hook in global_hooks():
        walk.value(hook, "a hook of all modules")
    if graph is not None:
        walk.graph(graph)
    return guard


def _slots(cls: type) -> list[str]:
    return [name for base in cls.__mro__ for name, of in vars(base).items() if isinstance(of, MemberDescriptorType)]


class _Walk:
    def __init__(self, guard: ReadGuard, names: AttributeReads | None, modules: Mapping[str, nn.Module]) -> None:
        """Without names it looks into no object."""
        self.guard, self.names = guard, names
        classes = {type(part) for root in modules.values() for part in root.modules()}
        self.files = {module_of(base) for cls in classes for base in cls.__mro__}
        self.objects: list[Any] = []
        self.clocks = False  # whether a function names one
        self.seen: dict[Any, Any] = {}  # by ids of what was looked into, which live as long as these count

    def _beyond(self, of: Any) -> bool:
        """Whether a function, class or module is not walked."""
        return foreign(of) or (module_of(of) not in self.files and installed(of))

    def _first(self, *what: Any) -> bool:
        key = tuple(map(id, what))
        if key in self.seen:
            return False
        self.seen[key] = what
        return True

    # Modules

    def graph(self, graph: Any) -> None:
        """The graph itself: its modules and optimizers, what `build` reads of it, and what that is in reach of."""
        self.guard.size(vars(graph), "an attribute of the graph")
        for name, value in vars(graph).items():
            inside = value if isinstance(value, list | tuple) else [value]
            if not name.startswith("_") and any(isinstance(x, nn.Module | Optimizer) for x in inside):
                self.guard.item(vars(graph), name, value, f"{name} of the graph")
                if isinstance(value, list):
                    self.guard.size(value, f"{name} of the graph")
                    for at, part in enumerate(value):
                        self.guard.item(value, at, part, f"{name}[{at}] of the graph")
        self._attributes(graph, "the graph")
        self._of_class(type(graph), "build", "build of the graph")

    def module(self, module: nn.Module, path: str) -> None:
        if not self._first(module):
            return
        guard, held, title = self.guard, vars(module), path or "the model"
        guard.type(module, f"the class of {title}")
        for table in _TABLES:
            guard.size(held[table], f"{table[1:]} of {title}")
        for name, child in held["_modules"].items():
            guard.item(held["_modules"], name, child, joined_path(path, name))
        for name, value in [*held["_parameters"].items(), *held["_buffers"].items()]:
            if value is None:  # others are followed with the model's values
                guard.item(held[_TABLES[name in held["_buffers"]]], name, None, joined_path(path, name))
        for name, what in HOOKS.items():
            if not hooked(held[name]):
                guard.unhooked(held, name, f"{what} of {title}")
            else:
                guard.item(held, name, held[name], f"{what} of {title}")
                self._container(held[name], f"{what} of {title}", frozenset())
        self._attributes(module, title)

    def _attributes(self, owner: Any, title: str) -> None:
        """The attributes that were read of an object, where they stand: with itself or with its class."""
        held, unknown = getattr(owner, "__dict__", {}), {ALL} if is_data(owner) and self.names is not None else set()
        names = (self.names or {}).get(type(owner), unknown)
        if ALL in names:
            self.guard.size(held, title)
            names = {*held, *_slots(type(owner))}
            if is_data(owner):
                self.value(type(owner), title)
        for name in sorted(names):
            if name in (_MACHINERY if isinstance(owner, nn.Module) else held.get("_machinery", ())):
                continue
            said = f"{name} of {title}"
            if name in held:
                self.guard.item(held, name, held[name], said)
                self.value(held[name], said)
            elif not (isinstance(owner, nn.Module) and any(name in held[table] for table in _TABLES)):
                self._of_class(type(owner), name, said, owner)
                if hasattr(owner, "__dict__"):
                    self.guard.lacks(held, name, said)

    def _of_class(self, cls: type, name: str, title: str, owner: Any = None) -> None:
        """An attribute that a class has, if it does; one with slots keeps it with the object."""
        mro = cls.__mro__
        at, base = next(((at, base) for at, base in enumerate(mro) if name in vars(base)), (len(mro), None))
        for other in mro[:at]:
            if not foreign(other):
                self.guard.lacks(vars(other), name, title)
        if base is None or base in _ROOTS:
            return
        found = vars(base)[name]
        if isinstance(found, MemberDescriptorType):
            if owner is not None and hasattr(owner, name):
                self.guard.attribute(owner, name, getattr(owner, name), title)
                self.value(getattr(owner, name), title)
            return
        self.guard.item(vars(base), name, found, title)
        self.value(found, title)

    # Values

    def value(self, value: Any, title: str, names: frozenset[str] = frozenset()) -> None:
        """Walk a value of any kind that code had in reach; `names` are the attributes that this code names."""
        if isinstance(value, (*PLAIN, Tensor, Optimizer)):
            return
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, nn.Module):
            self.module(value, title)
        elif isinstance(value, MethodType):
            self.value(value.__self__, title)
            self.value(value.__func__, title)
        elif isinstance(value, staticmethod | classmethod):
            self.value(value.__func__, title)
        elif isinstance(value, property):
            for each in filter(None, (value.fget, value.fset)):
                self.value(each, title)
        elif isinstance(value, partial):
            self._container(value.args, title, names)
            self._container(value.keywords, title, names)
            self.value(value.func, title)
        elif isinstance(value, ModuleType):
            self._namespace(value, vars(value), title, names)
        elif isinstance(value, type):
            self._class(value, title, names)
        elif isinstance(value, UserDict | UserList):
            self.guard.attribute(value, "data", value.data, title)
            self._container(value.data, title, names)
        elif isinstance(value, Mapping | list | tuple | set | frozenset | deque | np.ndarray):
            self._container(value, title, names)
        elif isinstance(value, SimpleNamespace):
            self._container(vars(value), title, names)
        elif hasattr(value, "__wrapped__"):
            self.value(value.__wrapped__, title)
        elif is_data(value):
            self._object(value, title)

    def _container(self, value: Any, title: str, names: frozenset[str]) -> None:
        if not self._first(value):
            return
        if isinstance(value, set | frozenset | np.ndarray):
            self.guard.content(value, title)
            return
        if not isinstance(value, tuple):
            self.guard.size(value, title)
        plain = isinstance(value, tuple)
        for key, part in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
            said = f"{title}[{key!r}]"
            if not plain:
                self.guard.item(value, key, part, said)
            self.value(part, said, names)

    def _object(self, value: Any, title: str) -> None:
        if not self._first(value):
            return
        self.objects.append(value)
        cls = type(value)
        self.guard.type(value, f"the class of {title}")
        self._attributes(value, title)
        for base in cls.__mro__:
            if not self._beyond(base):
                for name, method in list(vars(base).items()):
                    if isinstance(method, FunctionType) and name.startswith("__"):  # which are found on the class alone
                        self._of_class(cls, name, f"{name} of {title}")

    def _function(self, function: FunctionType) -> None:
        if not self._first(function):
            return
        guard, code = self.guard, function.__code__
        where = f"{function.__name__} of {Path(code.co_filename).name}"
        called = names_in(code)
        names = called.attributes
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                found = cell.cell_contents
            except ValueError:
                continue
            if name == "__class__":
                continue
            said = f"{name}, which {where} closes over"
            guard.attribute(cell, "cell_contents", found, said)
            self.value(found, said, names)
        if self._beyond(function):
            return
        guard.attribute(function, "__code__", code, where)
        for name in ("__defaults__", "__kwdefaults__"):
            guard.attribute(function, name, getattr(function, name), f"defaults of {where}")
            self.value(getattr(function, name), f"defaults of {where}", names)
        for name in sorted(called.imported & sys.modules.keys()):
            self.clocks = self.clocks or names_clock(sys.modules[name], names)
            self.value(sys.modules[name], name, names)
        for name in sorted(called.globals):
            if name in function.__globals__:
                found, said = function.__globals__[name], f"the global {name} that {where} reads"
                self.clocks = self.clocks or names_clock(found, names)
                guard.item(function.__globals__, name, found, said)
                self.value(found, said, names)
                if name in called.handed:
                    self.value(found, said)
        if hasattr(function, "__wrapped__"):
            self.value(function.__wrapped__, where)

    def _namespace(self, of: Any, held: Any, title: str, names: frozenset[str]) -> None:
        """The parts of a module, or class, that code names. Without names it is not known which code has it in its
        hand, so all counts that is no function, class or module."""
        if not self._first(of, names):
            return
        if not names and not self._beyond(of):
            self.guard.size(held, title)
            names = frozenset(name for name, part in held.items() if not isinstance(part, _NAMED))
        for name in sorted(names.intersection(held)):
            if not name.startswith("__"):
                said = f"{name} of {title}"
                self.guard.item(held, name, held[name], said)
                if foreign(of) or not self._beyond(of):
                    self.value(held[name], said, names)

    def _class(self, cls: type, title: str, names: frozenset[str]) -> None:
        """A class by name: its parts that code names, and methods that code may call on its instances."""
        for base in cls.__mro__:
            if self._beyond(base):
                continue
            mine = [each for each in vars(base).values() if isinstance(each, FunctionType)]
            inner = names.union(*(names_in(each.__code__).attributes for each in mine))
            if self._first(base):
                for each in mine:
                    self._function(each)
                self._namespace(base, vars(base), title, inner)
            self._namespace(base, vars(base), title, names)
