"""Garbage in circles, which waits while a step is planned."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


@contextmanager
def uncollected() -> Iterator[None]:
    """Garbage in circles waits inside, because nearly all that a planner makes stays.

    Python looks for it after every few hundred objects, and now and then among all that there are: that is as long as a
    plan's choice, a third of a small model's first step, half of the capture of a deep one.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
