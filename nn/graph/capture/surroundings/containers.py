"""Containers that a program can reach, as they were before it was captured.

    a module's own, and what hangs from it      is put back as it was, as far as the program changed it, and what is no
                                                tensor is done again behind each step
    beside it: classes, files, libraries        keeps what the program did, but for tensors without values

Files are those of the model's classes, and of what these call in their own package; none of torch or of Python itself.
"""

import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import _lru_cache_wrapper
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from .....placement.structure import ByIdentity
from .contents import Content, attributes_of, beside, inner, kind_of
from .draws import is_stream

__all__ = ["Containers"]

# Packages whose objects are not put back, because others may use them at the same time, such as locks and threads.
_SHARED = frozenset({__name__.partition(".")[0], "torch", "numpy", *sys.stdlib_module_names}) - {"__main__"}
_MANY = 100_000  # containers that are looked into; those further away are left alone
_LONG = 10_000  # entries of one that is no module's own
_DEEP = 3  # levels below a file or class: a method, its cell, what is in there
_RESULT = 4  # levels of what a cached function gave: tuples in lists in dicts


class Containers:
    """The contents of all of them, as they were. `fake` tells a tensor of this capture."""

    def __init__(self, fake: Callable[[Tensor], bool]) -> None:
        self.fake = fake
        self.caches = LruCaches()
        self.deeds: list[Callable[[], None]] = []  # what the program did to modules, to be done again
        # Numbers that it changed beside these, by container and key; None for a list of a module.
        self.before: dict[tuple[ByIdentity, Any], Any] = {}
        self.streams: list[Any] = []  # random numbers and iterators, in the order in which they were met
        self._undo: list[Callable[[], None]] = []
        self._done: set[int] = set()
        self._kept: dict[int, tuple[Any, Content, bool]] = {}
        self._met: dict[int, Any] = {}  # kept alive, for they are known by their identity

    def keep(self, modules: Iterable[nn.Module], program: Any) -> None:
        """Note what modules hold, and what lies beside these and a program."""
        listed = list(modules)
        self._spread([vars(module) for module in listed], sys.maxsize)
        classes = dict.fromkeys(cls for module in listed for cls in type(module).__mro__)
        functions = _functions(program)
        files = _files(each.__module__ for each in (*classes, *functions) if isinstance(each.__module__, str))
        self._spread([*classes, *functions, *files], _DEEP)

    def restore(self) -> None:
        """Put back all containers that were changed. This may be done twice: one that is back already stays."""
        for held, before, whole in self._kept.values():
            if not before and type(held) in _EMPTY and not held:
                continue
            now = _read(held)
            if not _same(now, before):
                self._note_deeds(held, now, before, whole)
                wanted = before if whole else self._without_fakes(held, now, before)
                kind = kind_of(held)
                if wanted is not None and kind is not None:
                    kind.put(held, now, wanted)
        self.caches.drop(self.holds)

    def undo(self) -> None:
        """Bring numbers beside modules back, too: the program is to run once more."""
        for put in self._undo:
            put()

    def _note_deeds(self, held: Any, now: Content, before: Content, whole: bool) -> None:
        """Note what was done to a container, once."""
        kind = kind_of(held)
        if kind is None or id(held) in self._done:
            return
        self._done.add(id(held))
        if not kind.keyed:
            if whole and not self.holds([value for _, value in now]):
                self.deeds.append(lambda: kind.put(held, kind.read(held), now))
                self.before[ByIdentity(held), None] = None
            return
        old = dict(before)
        changed = {key: value for key, value in now if old.get(key, _ABSENT) is not value}
        if not whole:
            numbers = {
                key: old[key]
                for key, value in changed.items()
                if type(value) in _NUMBERS and type(old.get(key, _ABSENT)) in _NUMBERS
            }
            if numbers:
                self.before.update(((ByIdentity(held), key), value) for key, value in numbers.items())
                self._undo.append(lambda: kind.put(held, entries := kind.read(held), _with(entries, numbers, [])))
            return
        made = {key: value for key, value in changed.items() if not isinstance(value, Tensor) and not self.holds(value)}
        gone = [key for key in old.keys() - dict(now).keys() if not isinstance(old[key], Tensor)]
        if made or gone:
            self.deeds.append(lambda: kind.put(held, entries := kind.read(held), _with(entries, made, gone)))

    def holds(self, value: Any) -> bool:
        """Whether there is a fake in a value, however deep."""
        waiting, met = deque([value]), dict[int, Any]()
        while waiting and len(met) < _MANY:
            value = waiting.popleft()
            if id(value) in met or isinstance(value, type | ModuleType):
                continue
            met[id(value)] = value
            if _is_shared(value):
                continue
            if isinstance(value, Tensor):
                if self.fake(value):
                    return True
                continue
            waiting.extend((*inner(value), *beside(value)))
            for held in (value, *attributes_of(value)):
                waiting.extend(part for entry in _read(held) for part in entry)
        return False

    def _spread(self, roots: Iterable[Any], deep: int) -> None:
        waiting = deque((root, deep > _DEEP, deep) for root in roots)
        while waiting and len(self._kept) < _MANY:
            value, whole, deep = waiting.popleft()
            if id(value) not in self._met and not isinstance(value, Tensor | ModuleType) and not _is_shared(value):
                self._met[id(value)] = value
                if is_stream(value):
                    self.streams.append(value)
                parts = self._look(value, whole)
                waiting.extend((part, mine, deep - 1 if mine else min(deep - 1, _DEEP)) for part, mine in parts if deep)

    def _look(self, value: Any, whole: bool) -> list[tuple[Any, bool]]:
        """Note a container or an object. Returned is what hangs from it, with whether to put that back wholly."""
        if isinstance(value, _lru_cache_wrapper):
            self.caches.add(value)
        found = [(part, whole) for part in inner(value)] + [(part, False) for part in beside(value)]
        if kind_of(value) is not None:
            found += self._note(value, whole)
        shared = _of_shared(type(value))
        if whole or not shared or isinstance(value, FunctionType):
            for held in attributes_of(value):
                if id(held) not in self._met:
                    self._met[id(held)] = held
                    found += self._note(held, whole and not shared)
                    found.append((type(value), False))
        return found

    def _note(self, held: Any, whole: bool) -> list[tuple[Any, bool]]:
        content = _read(held)
        if not whole and len(content) > _LONG:
            return []
        self._kept[id(held)] = held, content, whole
        found = []
        for _, part in content:
            if type(part) in _EMPTY and not part:  # such as the tables of hooks, a dozen for each module
                if id(part) not in self._met:
                    self._met[id(part)], self._kept[id(part)] = part, (part, [], whole)
            elif type(part) not in _ATOMS and not _keeps_nothing(part):
                found.append((part, whole))
        return found

    def _without_fakes(self, held: Any, now: Content, before: Content) -> Content | None:
        """The content as it is now, with earlier values in the place of those that hold fakes; None if none does."""
        old = {id(value) for _, value in before}
        bad = {at for at, entry in enumerate(now) if id(entry[1]) not in old and self.holds(entry)}
        kind = kind_of(held)
        if not bad or kind is None or not kind.keyed:
            return before if bad else None
        known = {id(key): (key, value) for key, value in before}
        wanted = [known.get(id(entry[0])) if at in bad else entry for at, entry in enumerate(now)]
        return [entry for entry in wanted if entry is not None]


class LruCaches:
    """Functions with an lru_cache, as they were met. No tensor without values may stay in one, and only `cache_clear`
    takes something out."""

    def __init__(self) -> None:
        self.met: dict[int, tuple[Any, int]] = {}  # with how often each had to compute
        self._tensors: dict[int, tuple[Tensor, str]] | None = None

    def add(self, function: Any) -> None:
        """A function, if it has such a cache."""
        if id(function) not in self.met:
            self.met[id(function)] = function, function.cache_info().misses

    def known(self, tensor: Tensor) -> str:
        """The function that had computed a tensor before, if one had, by its name."""
        if self._tensors is None:
            self._tensors = {
                id(x): (x, str(getattr(function, "__qualname__", function)))
                for function, _ in self.met.values()
                for x in _tensors(gc.get_referents(function), _RESULT)
            }
        found = self._tensors.get(id(tensor))
        return found[1] if found is not None else ""

    def drop(self, holds: Any) -> None:
        """Empty those that have computed something since, if what they keep `holds` a fake."""
        for function, misses in self.met.values():
            if function.cache_info().misses != misses and holds(gc.get_referents(function)):
                function.cache_clear()


def _tensors(value: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep and isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part, deep - 1)
    elif deep and isinstance(value, dict):
        for part in list(value.values()):
            yield from _tensors(part, deep - 1)


def _functions(program: Any) -> list[FunctionType]:
    """The functions that a program is made of: itself, its parts, and those that it has closed over."""
    waiting, met = deque([program]), dict[int, Any]()
    while waiting:
        value = waiting.popleft()
        if id(value) not in met:
            met[id(value)] = value
            cell = [value.cell_contents] if isinstance(value, CellType) and _read(value) else []
            waiting.extend((*beside(value), *(part for part in inner(value) if callable(part)), *cell))
    return [value for value in met.values() if isinstance(value, FunctionType)]


def _files(names: Iterable[str]) -> list[dict[str, Any]]:
    """The globals of the files of these names, and of those of their packages that they take from."""
    first = [name for name in dict.fromkeys(names) if name.partition(".")[0] not in _SHARED and name in sys.modules]
    found = dict.fromkeys(first)
    for name in first:
        for value in list(vars(sys.modules[name]).values()):
            other = str(value.__module__) if isinstance(value, type | FunctionType) else ""
            if other.partition(".")[0] == name.partition(".")[0] and other in sys.modules:
                found[other] = None
    return [vars(sys.modules[name]) for name in found]


def _of_shared(cls: Any) -> bool:
    return str(cls.__module__).partition(".")[0] in _SHARED


def _is_shared(value: Any) -> bool:
    """Whether it is a class or function that programs share, or what is ours."""
    return (isinstance(value, type | FunctionType) and _of_shared(value)) or str(type(value).__module__).startswith(
        _OURS
    )


def _with(entries: Content, made: dict[Any, Any], gone: list[Any]) -> Content:
    """Entries with others in their place, or added, and without some."""
    found = [(key, made.get(key, value)) for key, value in entries if key not in gone]
    known = {key for key, _ in found}
    return found + [(key, value) for key, value in made.items() if key not in known]


def _keeps_nothing(value: Any) -> bool:
    """Whether it is a function that has only its code."""
    return type(value) is FunctionType and not (value.__closure__ or value.__defaults__ or value.__dict__)


def _read(held: Any) -> Content:
    kind = kind_of(held)
    return [] if kind is None else kind.read(held)


def _same(one: Content, other: Content) -> bool:
    return len(one) == len(other) and all(a is b and x is y for (a, x), (b, y) in zip(one, other, strict=True))


_OURS = __name__.partition(".")[0]
_ABSENT = object()
_NUMBERS = frozenset({int, float, bool, str, type(None)})
_EMPTY = frozenset({dict, OrderedDict, list, set})  # of which an empty one is nothing but that
_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
