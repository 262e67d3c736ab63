"""Caches of functions, `functools.lru_cache`: what they keep between calls, and none of it a tensor without values."""

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["LruCaches"]

_DEEP = 4  # tuples in lists in dicts: as far as results are looked into


class LruCaches:
    """Functions with an lru_cache, as they were met. Nothing but `cache_clear` takes something out of one."""

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
                for x in _kept(gc.get_referents(function), _DEEP)
            }
        found = self._tensors.get(id(tensor))
        return found[1] if found is not None else ""

    def drop(self, holds: Any) -> None:
        """Empty those that have computed something since, if what they keep `holds` a fake."""
        for function, misses in self.met.values():
            if function.cache_info().misses != misses and holds(gc.get_referents(function)):
                function.cache_clear()


def _kept(value: Any, deep: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif deep and isinstance(value, list | tuple):
        for part in value:
            yield from _kept(part, deep - 1)
    elif deep and isinstance(value, dict):
        for part in list(value.values()):
            yield from _kept(part, deep - 1)
