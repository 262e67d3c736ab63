"""The result of a captured step: its tensors as numbers of values, and how they are put together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ....placement.errors import SbpError
from ....placement.structure import is_simple, part_at, replaced
from ....placement.world import world
from ....sbp.call import Ref, frozen
from ...model.slots import joined_path
from ...tensors.tensor import GlobalTensor
from .caches import CacheArgument, CacheStandIn, GivenCache, cache_parts, copied_by
from .tape import Tape

__all__ = ["CacheResults", "CapturedResult"]


class CapturedResult:
    """Results on a tape. A tensor of a module that code got hold of by itself is `known` by its fake."""

    def __init__(self, tape: Tape, known: Callable[[Tensor], Tensor | None]) -> None:
        self.tape, self.known = tape, known

    def of(self, result: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The values of a result, and the function that puts their tensors where they stand in it."""
        if is_simple(result):
            return replaced(result, self._refer), _same
        flat, rebuild = self._taken_apart(result)
        return flat, lambda tensors: rebuild(tensors, ())

    def _taken_apart(self, result: Any) -> tuple[tuple[Ref, ...], Callable[[Any, Sequence[Any]], Any]]:
        """The distinct tensors of a result, and the function that puts them, and caches, where they stand in it."""
        fakes: list[Tensor] = []

        def noted(path: str, x: Tensor) -> Tensor:
            fakes.append(x)
            return x

        kept = replaced(result, noted, objects=True)
        distinct = {id(x): x for x in fakes}
        order = {n: at for at, n in enumerate(distinct)}

        def rebuild(tensors: Any, caches: Sequence[Any]) -> Any:
            def put(_: str, x: Any) -> Any:
                return caches[x.number] if isinstance(x, GivenCache) else tensors[order[id(x)]]

            return replaced(kept, put, objects=True, kind=(Tensor, GivenCache))

        return tuple(self._refer("", x) for x in distinct.values()), rebuild

    def with_caches(
        self, result: Any, caches: Sequence[CacheStandIn], given: Mapping[int, tuple[Tensor, int]]
    ) -> tuple[Any, Callable[[Any], Any]]:
        """The same of a result that comes with caches, of whose tensors these were given: by the identity of fakes the
        real one, and its number. What a cache holds goes on to lie as it was given."""
        returned, rebuild = self._taken_apart(result)
        values: list[Ref] = []

        def slot(of: CacheArgument, path: str, x: Tensor, before: Tensor | None) -> _Slot | None:
            self._refer(path, x)
            real, number = (None, -1) if before is None else given[id(before)]
            if self.tape.number(x) == number:
                return None
            pin = None if of.pins is None else of.pins(path, x)
            if pin is not None:
                x = self.tape.flow(x, pin)
            elif isinstance(real, GlobalTensor) and real.shape == x.shape:
                x = self.tape.flow(x, real._layout.state)
            values.append(Ref(self.tape.number(x)))
            return _Slot(len(values) - 1, plain=x.ndim < 2 and not isinstance(real, GlobalTensor))

        changes = [_Changes(each, partial(slot, each.argument)).found for each in caches]
        return (returned, values), CacheResults(rebuild, changes)

    def _refer(self, path: str, x: Tensor) -> Ref:
        known = x if isinstance(x, FakeTensor) else self.known(x)
        if known is None:
            raise SbpError(
                f"capture: the result has a tensor {tuple(x.shape)} at {path or 'its top'} that was not captured\n"
                "  compute it from the inputs, or leave it out of what is returned"
            )
        return Ref(self.tape.number(known))


def _same(result: Any) -> Any:
    return result


# What becomes of caches


@dataclass(frozen=True, eq=False)
class _Slot:
    """A value of the step stands here. One that counts, such as tokens, is a plain tensor on every rank."""

    number: int
    plain: bool


@dataclass(frozen=True, eq=False)
class _Added:
    """So much is added to the number that stands here."""

    number: int


@dataclass(frozen=True, eq=False)
class _Change:
    """A part of a cache that is another behind a step: the keys that lead to it, and what it is then."""

    keys: tuple[Any, ...]
    value: Any


class _Changes:
    """How a stand-in differs from the cache that it stands for.

    `slot` is given a tensor of the stand-in with its path, and the one that the step was given there; it says which
    value of the step comes there, or None if it is what was given.
    """

    def __init__(self, of: CacheStandIn, slot: Callable[[str, Tensor, Tensor | None], _Slot | None]) -> None:
        self.given, self.slot, self.found = of.argument, slot, list[_Change]()
        self._look(of.argument.cache, of.cache, ())

    def _look(self, before: Any, now: Any, keys: tuple[Any, ...]) -> None:
        path = ".".join(map(str, keys))
        if isinstance(now, Tensor):
            place = self.slot(path, now, self.given.get(path))
            self.found += [] if place is None else [_Change(keys, place)]
            return
        was, inside = cache_parts(before), cache_parts(now)
        if inside is None:
            self._look_at_leaf(self.given.counters.get(path, before), now, keys)
        elif was is None or type(before) is not type(now) or not was.keys() <= inside.keys():
            self.found.append(_Change(keys, self._new(now, path)))
        else:
            for key, part in inside.items():
                if key in was:
                    self._look(was[key], part, (*keys, key))
                else:
                    self.found.append(_Change((*keys, key), self._new(part, joined_path(path, str(key)))))

    def _look_at_leaf(self, before: Any, now: Any, keys: tuple[Any, ...]) -> None:
        if type(now) is int and type(before) is int:
            self.found += [_Change(keys, _Added(now - before))] if now != before else []
        elif before is not now and (isinstance(before, Tensor) or frozen(before) != frozen(now)):
            self.found.append(_Change(keys, now))

    def _new(self, value: Any, path: str) -> Any:
        return copied_by(value, path, lambda path, x: self.slot(path, x, None))


class CacheResults:
    """The result of a step that was given caches: what it returns, and values of which these become others."""

    def __init__(self, rebuild: Callable[[Any, Sequence[Any]], Any], changes: Sequence[Sequence[_Change]]) -> None:
        self.rebuild, self.changes = rebuild, changes

    def __call__(self, returned: tuple[Any, Sequence[Tensor]]) -> tuple[Any, Sequence[Tensor]]:
        return returned

    def put_back(self, args: Sequence[Any], kwargs: Mapping[str, Any], returned: tuple[Any, Sequence[Tensor]]) -> Any:
        """Have the caches that were passed become what the step made of them; the result with these in it."""
        result, values = returned
        caches = [x.cache for x in (*args, *kwargs.values()) if isinstance(x, CacheArgument)]
        for cache, changes in zip(caches, self.changes, strict=True):
            for change in changes:
                _put(cache, change, values)
        return self.rebuild(result, caches)


def _put(cache: Any, change: _Change, values: Sequence[Tensor]) -> None:
    *way, last = change.keys
    held = cache
    for key in way:
        held = part_at(held, key)
    table = held if isinstance(held, list | dict) else vars(held)
    if isinstance(change.value, _Added):
        table[last] += change.value.number
    elif type(table) is list and last == len(table):
        table.append(_filled(change.value, values))
    else:
        table[last] = _filled(change.value, values)


def _filled(value: Any, values: Sequence[Tensor]) -> Any:
    """A part of a cache with the step's values in their places."""
    if type(value) is not _Slot:
        return value if cache_parts(value) is None else copied_by(value, "", lambda _, x: _filled(x, values), _Slot)
    x = values[value.number]
    return _count(x) if value.plain and isinstance(x, GlobalTensor) else x


def _count(x: GlobalTensor) -> Tensor:
    """A number on every rank, without a look at how it may get there where it is there already."""
    of, here = x._layout, world()
    there = not of.shape and not of.state.partial and (here.rank is None or here.size == of.placement.size)
    return x._shards[0] if there else x.full_tensor()
