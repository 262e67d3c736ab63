"""The guard of a plan: values that its capture was in reach of, in columns that are compared before each step.

    read          of                 with            must be
    getitem       a dict, a list     its key         the same object, or an equal number or text
    getattr       a cell, a function the attribute   the same
    contains      a dict             a name          False: nothing stands before what was found
    len, type, tuple  its keys, in their order, ...

A column is read by one C function in one pass, some 25 ns a row; only where a row is another object it is looked at.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules import module as calls

from ....placement.structure import ByIdentity
from ....sbp.call import frozen
from ...model.reading import begin_forward, end_forward
from ...tensors.tensor import GlobalTensor
from .code import foreign

__all__ = ["PLAIN", "ReadChange", "ReadGuard", "global_hooks", "hooked", "is_plain"]

# The types of values that are no tensors and have no inside, such as numbers and text.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_GLOBAL_HOOKS = [
    calls._global_forward_hooks, calls._global_forward_pre_hooks,
    calls._global_backward_hooks, calls._global_backward_pre_hooks,
]  # fmt: skip
_MISSED = (LookupError, AttributeError, TypeError, ValueError)


class ReadChange(NamedTuple):
    """A value that is another now, as users say it."""

    title: str
    was: Any
    now: Any

    def __str__(self) -> str:
        shown = [repr(x) if is_plain(x) and len(repr(x)) < 40 else None for x in (self.was, self.now)]
        return self.title if None in shown else f"{self.title} ({shown[0]}, and now {shown[1]})"


class _MissedRead:
    def __repr__(self) -> str:
        return "gone"


GONE = _MissedRead()


class _Column:
    """Rows that one function reads."""

    def __init__(self, read: Callable[..., Any], count: int) -> None:
        self.read, self.asked = read, tuple[list[Any], ...]([] for _ in range(count))
        self.values: list[Any] = []
        self.titles: list[str] = []

    def add(self, asked: Sequence[Any], value: Any, title: str) -> None:
        for rows, each in zip(self.asked, asked, strict=True):
            rows.append(each)
        self.values.append(value)
        self.titles.append(title)

    def changed(self, follow: Callable[[Any, Any, str], bool]) -> ReadChange | None:
        """The first row that is not what it was; others that are equal are known by what they are now. Whoever follows
        containers is asked about those that were replaced."""
        for at, (asked, value) in enumerate(zip(zip(*self.asked, strict=True), self.values, strict=True)):
            try:
                now = self.read(*asked)
            except _MISSED:
                now = GONE
            if now is not value:
                if not (_alike(value, now) or follow(value, now, self.titles[at])):
                    return ReadChange(self.titles[at], value, now)
                self.values[at] = now
        return None

    def drop(self, held: Any) -> None:
        """Read nothing of a container any more."""
        rows = zip(zip(*self.asked, strict=True), self.values, self.titles, strict=True)
        kept = [row for row in rows if row[0][0] is not held]
        self.values, self.titles = [value for _, value, _ in kept], [title for *_, title in kept]
        for at, column in enumerate(self.asked):
            column[:] = [asked[at] for asked, *_ in kept]


class ReadGuard:
    """All that a capture went by besides its arguments and what tensors hold."""

    def __init__(self, before: Mapping[tuple[ByIdentity, Any], Any] | None = None) -> None:
        self._before = before or {}  # values by container and key that the capture has changed
        self._items = _Column(operator.getitem, 2)
        self._parts = _Column(dict.__getitem__, 2)  # in dicts of a class of their own, which may answer otherwise
        self._attributes = _Column(getattr, 2)
        self._lacking = _Column(operator.contains, 2)
        self._types = _Column(type, 1)
        self._sizes = _Column(len, 1)
        self._keys = _Column(tuple, 1)
        self._names = _Column(_names, 1)  # of classes and Python modules
        self._contents = _Column(_content, 1)
        self._hooks = _Column(operator.getitem, 2)  # of modules that have none
        self._columns = (
            self._items, self._parts, self._attributes, self._lacking, self._types, self._sizes, self._keys,
            self._names, self._contents,
        )  # fmt: skip
        self._compared: list[tuple[_Column, Callable[[Any, Any], Any]]] = []  # those with rows, and how
        self._global_hooks = global_hooks()
        self._known: set[Any] = set()
        self._followed: list[tuple[list[Any], list[Any], str]] = []  # those that stand in the place of others

    def _add(self, column: _Column, title: str, value: Any, *asked: Any) -> None:
        first, *more = asked
        key = id(column), id(first), *more
        if key not in self._known:
            self._known.add(key)
            if not column.values and column is not self._hooks:
                self._compared.append((column, operator.is_ if column in self._columns[:5] else operator.eq))
            column.add(asked, value, title)

    def item(self, held: Any, key: Any, value: Any, title: str) -> None:
        """An entry of a dict or list."""
        raw = isinstance(held, dict) and type(held).__getitem__ is not dict.__getitem__
        value = self._before.get((ByIdentity(held), key), value) if self._before else value
        self._add(self._parts if raw else self._items, title, value, held, key)

    def attribute(self, of: Any, name: str, value: Any, title: str) -> None:
        value = self._before.get((ByIdentity(of), ""), value) if self._before and name == "cell_contents" else value
        self._add(self._attributes, title, value, of, name)

    def lacks(self, held: Any, name: str, title: str) -> None:
        """A name that a dict does not have."""
        self._add(self._lacking, title, False, held, name)

    def type(self, of: Any, title: str) -> None:
        self._add(self._types, title, type(of), of)

    def size(self, of: Any, title: str) -> None:
        """Guard the count of parts; names also by themselves and in their order, because code may go through them."""
        if isinstance(of, Mapping) and not _by_name(of):
            self._add(self._contents, title, _content(of), of)
        elif isinstance(of, Mapping) and len(of) > 1:
            self._add(self._names if _is_namespace(of) else self._keys, title, _names(of), of)
        else:
            self._add(self._sizes, title, len(of), of)

    def content(self, of: Any, title: str) -> None:
        """All of a set, or of an array; the keys of a dict."""
        self._add(self._contents, title, _content(of), of)

    def unhooked(self, held: Any, name: str, title: str) -> None:
        """A table of hooks that is empty, whichever dict stands there."""
        self._add(self._hooks, title, None, held, name)

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            for column, same in self._compared:
                if not all(map(same, map(column.read, *column.asked), column.values)):
                    return self.change() is None
            if not (any(map(operator.getitem, *self._hooks.asked)) or any(_GLOBAL_HOOKS) or self._global_hooks):
                return True
        except _MISSED:
            pass
        return self.change() is None

    def change(self) -> ReadChange | None:
        """A value that is not as it was."""
        found = next(filter(None, (column.changed(self._follows) for column in self._columns)), None)
        self._go_on()
        if found is not None:
            return found
        for held, name, title in zip(*self._hooks.asked, self._hooks.titles, strict=True):
            if hooked(held[name]):
                return ReadChange(title, {}, held[name])
        now = global_hooks()
        return None if now == self._global_hooks else ReadChange("hooks of all modules", self._global_hooks, now)

    def _follows(self, old: Any, new: Any, title: str) -> bool:
        """Whether a list of numbers and texts has an equal one in its place, such as the name of an adapter that is
        switched back to; the parts of that are guarded from now on. One that the program changes is followed by what
        it did to it, and only where it stood."""
        if type(old) is not list or type(new) is not list or (ByIdentity(old), None) in self._before:
            return False
        if not (is_plain(tuple(old)) and is_plain(tuple(new)) and frozen(tuple(old)) == frozen(tuple(new))):
            return False
        self._followed.append((old, new, title))
        return True

    def _go_on(self) -> None:
        """Read the lists that stand in the place of others, which are let go of where they stand nowhere else."""
        for old, new, title in self._followed:
            self.size(new, title)
            for at, part in enumerate(new):
                self.item(new, at, part, f"{title}[{at!r}]")
            if not any(value is old for column in self._columns for value in column.values):
                for column in self._columns:
                    column.drop(old)
                self._known = {key for key in self._known if key[1] != id(old)}
        self._followed.clear()

    def __len__(self) -> int:
        return sum(len(column.values) for column in (*self._columns, self._hooks))


def _names(held: Mapping[Any, Any]) -> tuple[Any, ...]:
    """The keys of a dict; those of a class or Python module without the ones that Python puts there as it goes."""
    return tuple([name for name in held if not name.startswith("__")] if _is_namespace(held) else held)


def _is_namespace(held: Mapping[Any, Any]) -> bool:
    return isinstance(held, MappingProxyType) or "__spec__" in held


def _by_name(held: Mapping[Any, Any]) -> bool:
    """Whether all keys are names, which equal nothing but the same name."""
    return all(type(name) is str for name in held)


def _content(of: Any) -> Any:
    if isinstance(of, np.ndarray):
        return of.shape, str(of.dtype), of.tobytes()
    return tuple(map(frozen, of)) if isinstance(of, Mapping) else frozenset(map(frozen, of))


def global_hooks() -> list[Any]:
    """The hooks of all modules, but for those by which torch and records follow calls."""
    return [hook for table in _GLOBAL_HOOKS for hook in table.values() if not foreign(hook)]


def hooked(table: Mapping[Any, Any]) -> bool:
    """Whether a module has hooks, but for those by which a refit waits for its forwards."""
    return any(hook not in (begin_forward, end_forward) for hook in table.values())


def is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def _alike(value: Any, now: Any) -> bool:
    """Whether code goes the same way by another value."""
    if type(now) is not type(value):
        return False
    if isinstance(value, Tensor):
        return bool(_kind(value) == _kind(now))
    if isinstance(value, tuple):
        return len(value) == len(now) and all(a is b or _alike(a, b) for a, b in zip(value, now, strict=True))
    return (is_plain(value) or isinstance(value, frozenset)) and frozen(now) == frozen(value)


def _kind(x: Tensor) -> Any:
    """All that a capture may have gone by of a tensor that it reads anew at each step."""
    lies = x._layout if isinstance(x, GlobalTensor) else (x.stride(), x.device)
    return tuple(x.shape), x.dtype, x.requires_grad, lies
