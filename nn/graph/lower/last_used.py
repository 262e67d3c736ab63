"""The values that were used last, by all that they depend on: equal layers and equal steps are worked out once."""

from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["LastUsed"]

Value = TypeVar("Value")


class LastUsed(Generic[Value]):
    """At most so many values, those that were used last. Other than `lru_cache` it keeps the keys alone alive, and not
    what a value was made of."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: dict[Hashable, Value] = {}

    def get(self, key: Hashable) -> Value | None:
        value = self.held.pop(key, None)
        return None if value is None else self.put(key, value)

    def put(self, key: Hashable, value: Value) -> Value:
        """Keep a value, which is the last used now."""
        self.held[key] = value
        if len(self.held) > self.most:
            self.held.pop(next(iter(self.held)))
        return value
