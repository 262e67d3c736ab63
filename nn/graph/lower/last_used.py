"""The values that were used last, by all that they depend on: equal layers and equal steps are worked out once."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LastUsed"]

Value = TypeVar("Value")


class LastUsed(Generic[Value]):
    """At most so many values, those that were used last. Other than `lru_cache` it keeps the keys alone alive, and not
    what a value was made of."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[Hashable, Value] = {}

    def of(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; it is made if there is none."""
        value = self.held.pop(key, None)
        if value is None:
            value = make()
        self.held[key] = value  # the last used is the last
        if len(self.held) > self.most:
            self.held.pop(next(iter(self.held)))
        return value
