"""Streams that a program draws from while it is captured: random numbers of Python and numpy, and iterators. Each gives
something else every time, and what it gave goes into the step.

A graph's own draws are torch's, at each step anew. A stream is any that the model or its code is in reach of.
"""

import operator
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from types import FrameType, GeneratorType
from typing import Any

from .....boxing.record import user_line
from .....placement.structure import ByIdentity
from .clocks import of_library
from .settings import drawn_states, same_setting

__all__ = ["Draws", "is_stream", "warn_of_draws"]

_ITERATORS: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter({})),
    type(iter({}.items())),
)


def is_stream(value: Any) -> bool:
    """Whether a value is one of these streams, which has a state that can be looked at."""
    return _reads(value) is not None


def _reads(value: Any) -> Callable[[], Any] | None:
    """A function that looks at the state of a stream; None where there is no way to."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate
    if isinstance(value, count):
        return value.__repr__
    if isinstance(value, GeneratorType):
        return lambda: value.gi_frame and (value.gi_frame.f_lasti, *map(ByIdentity, value.gi_frame.f_locals.values()))
    if isinstance(value, _ITERATORS):
        return lambda: operator.length_hint(value)
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            return lambda: value.bit_generator.state
        if hasattr(value, "get_state"):
            return lambda: value.get_state(legacy=False)
    return None


def _put_back(value: Any, state: Any) -> bool:
    """Bring random numbers back to where they were; whether that could be."""
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        return False
    return True


class Draws:
    """Draws between two times, from the streams of the process and from others."""

    def __init__(self) -> None:
        self._before, self.of_process = drawn_states(), False
        self._streams: list[tuple[Any, Callable[[], Any], Any]] = []
        self.random: list[tuple[Any, Callable[[], Any], Any]] = []  # those that numbers were drawn of
        self.iterators: list[Any] = []  # those that went on

    def follow(self, streams: Iterable[Any]) -> None:
        """Look at these, too, from now on."""
        for value in streams:
            read = _reads(value)
            if read is not None:
                self._streams.append((value, read, read()))

    def end(self) -> None:
        """Nothing more is drawn: note what was, and bring random numbers back."""
        self.of_process = not all(map(same_setting, self._before, drawn_states()))
        for value, read, before in self._streams:
            if not same_setting(before, read()):
                if _put_back(value, before):
                    self.random.append((value, read, before))
                else:
                    self.iterators.append(value)

    def some(self) -> bool:
        """Whether anything was drawn."""
        return self.of_process or bool(self.random or self.iterators)


class _DrawnLine:
    """Follows lines as they run, but for those of torch, of Python and of this package, up to one that draws."""

    def __init__(self, draws: Draws) -> None:
        self.of_process, self.before, self.random = draws.of_process, drawn_states(), draws.random
        self.last = self.found = ""

    def drawn(self) -> bool:
        of_process = self.of_process and not all(map(same_setting, self.before, drawn_states()))
        return of_process or any(not same_setting(before, read()) for _, read, before in self.random)

    def called(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        return None if self.found or of_library(path) else self.line

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.found:
            return None
        if self.drawn():
            self.found = self.last
            sys.settrace(None)  # it makes all calls slow
        elif event in ("line", "return"):  # behind a return its caller's line runs on
            self.last = user_line(frame if event == "line" else frame.f_back)
        return self.line


def warn_of_draws(draws: Draws, again: Callable[[], Any]) -> None:
    """A capture has drawn; `again` runs the program once more, so that it is known where."""
    if draws.iterators:
        kinds = ", ".join(sorted({type(each).__name__ for each in draws.iterators}))
        warnings.warn(
            f"capture: an iterator ({kinds}) goes on while the step is captured; all steps have what it gave then\n"
            "  take from it before the step, and make that an argument",
            stacklevel=2,
        )
    if not (draws.of_process or draws.random):
        return
    follower, before = _DrawnLine(draws), sys.gettrace()
    sys.settrace(follower.called)
    try:
        again()
    finally:
        sys.settrace(before)
    warnings.warn(
        f"capture: random numbers of Python or numpy are drawn at {follower.found or 'an unknown line'}, while "
        "the step is captured; all steps have those that were drawn then\n"
        "  draw them by torch.rand in the step, or before it, and make them an argument that is a tensor",
        stacklevel=2,
    )
