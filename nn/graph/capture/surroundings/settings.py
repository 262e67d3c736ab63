"""Settings of a process: those of torch that a program may change, and the states of its random numbers."""

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .....placement.device import FAMILIES

__all__ = ["Settings", "drawn_states", "same_setting"]


def _nested(value: int | None = None) -> int:
    """The number of autocast regions that the program is in; a `value` becomes that number."""
    torch.autocast_increment_nesting()
    now = int(torch.autocast_decrement_nesting())
    while value is not None and now != value:
        now = int(torch.autocast_decrement_nesting() if now > value else torch.autocast_increment_nesting())
    return now


def _numpy(state: Any = None) -> Any:
    """The state of numpy's random numbers, where a program has loaded it."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    if state is not None:
        numpy.random.set_state(state)
    return numpy.random.get_state(legacy=False)


def _generator(state: Any = None) -> Any:
    if state is not None:
        torch.default_generator.set_state(state)
    return torch.default_generator.get_state()


def same_setting(one: Any, other: Any) -> bool:
    """Whether two values that were read of one are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same_setting(one[name], other[name]) for name in one)
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


_DRAWN: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (random.getstate, random.setstate),
    (_numpy, _numpy),
)

# Each is read by the first and written by the second.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_nested, _nested),
    *[(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)) for kind in FAMILIES],
    *[(partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)) for kind in FAMILIES],
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *_DRAWN,
    (_generator, _generator),
)


def drawn_states() -> list[Any]:
    """The states of random numbers that are none of torch."""
    return [read() for read, _ in _DRAWN]


class Settings:
    """All of them as they are now."""

    def __init__(self) -> None:
        self._before = [read() for read, _ in _SETTINGS]

    def restore(self) -> None:
        for (read, write), before in zip(_SETTINGS, self._before, strict=True):
            if not same_setting(read(), before):
                write(before)
