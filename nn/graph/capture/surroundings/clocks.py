"""Clocks and sources of chance of the system, which a program asks while it is captured, and the line that asks.

Their answer goes into the step as it was then. To see who asks, all calls of C that Python makes are watched. That
takes as long as the capture itself, so it is done only where the code of the program names such a thing.
"""

import datetime
import os
import random
import secrets
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from .....boxing.record import is_ours, user_line

__all__ = ["Clocks", "names_clock", "of_library"]

_READ = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_TIMES = (*_READ, *(f"{name}_ns" for name in _READ), "localtime", "gmtime", "ctime", "strftime")
_CLOCKS: dict[Any, str] = {
    **{getattr(time, name): f"time.{name}()" for name in _TIMES},
    datetime.datetime.now: "datetime.now()",
    datetime.datetime.utcnow: "datetime.utcnow()",
    datetime.datetime.today: "datetime.today()",
    datetime.date.today: "date.today()",
    os.urandom: "chance of the system (os.urandom, secrets, uuid, a generator without a seed)",
}
_SEED = random.Random.seed.__code__
# Modules in which a program finds these, and of which files pass on what they ask.
_MODULES = frozenset({"time", "datetime", "_datetime", "posix", "nt", "os", "uuid", "secrets", "random"})
_BETWEEN = frozenset(str(module.__file__) for module in (uuid, secrets, random))
_NAMES = frozenset(
    {
        *_TIMES,
        "now", "utcnow", "today", "urandom", "uuid1", "uuid4", "token_bytes", "token_hex", "randbelow", "randbits",
        "choice", "SystemRandom", "Random", "default_rng", "RandomState", "random", "uniform", "randint",
    }
)  # fmt: skip


def names_clock(value: Any, attributes: frozenset[str]) -> bool:
    """Whether a value that code has by name may be, or lead by these attributes to, what `Clocks` sees."""
    if isinstance(value, ModuleType):
        known = value.__name__ in _MODULES or value.__name__.startswith("numpy")
        return known and not _NAMES.isdisjoint(attributes)
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    return module in _MODULES or module.startswith("numpy.random") or type(value).__module__ in _MODULES


class Clocks:
    """Questions that a program asked, and the line of the first."""

    def __init__(self) -> None:
        self.asked: dict[str, str] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Until the end all calls are seen; where somebody else profiles them, none is."""
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call":
            what = _CLOCKS.get(called)
            if what is not None:
                self._note(what, frame)
        elif event == "call" and frame.f_code is _SEED and frame.f_locals.get("a") is None:
            self._note(_CLOCKS[os.urandom], frame)

    def _note(self, what: str, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename in _BETWEEN:
            frame = frame.f_back
        if frame is not None and not of_library(frame.f_code.co_filename):
            self.asked.setdefault(what, user_line(frame))

    def warn(self) -> None:
        """Tell of all that was asked."""
        for what, line in self.asked.items():
            warnings.warn(
                f"capture: {what} is asked at {line}, while the step is captured; all steps have what it was then\n"
                "  ask before the step, and make it an argument that is a tensor; to measure times, take "
                "step.timeline()",
                stacklevel=2,
            )


_LIBRARY = os.path.dirname(os.__file__)
_INSTALLED = ("site-packages", "dist-packages")


def of_library(path: str) -> bool:
    """Whether a file is of Python, of torch or of this package: what these ask is for logs and locks."""
    return is_ours(path) or (path.startswith(_LIBRARY) and not any(part in path for part in _INSTALLED))
