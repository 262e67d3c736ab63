"""Random numbers of Python and numpy that a program draws while it is captured, and the line that draws them.

A graph's own draws are torch's, at each step anew. These are drawn once, and what was drawn goes into the step.
"""

import random
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from .....boxing.record import is_ours, user_line
from .settings import drawn_states, same_setting

__all__ = ["Draws", "warn_of_draws"]


class Draws:
    """Whether something was drawn between two times."""

    def __init__(self) -> None:
        self._before, self._end = drawn_states(), list[Any]()

    def end(self) -> None:
        self._end = drawn_states()

    def some(self) -> bool:
        return not all(map(same_setting, self._before, self._end or drawn_states()))


class _DrawnLine:
    """Follows lines as they run, but for those of torch and of this package, up to one that draws."""

    def __init__(self) -> None:
        self.draws, self.last, self.found = Draws(), "", ""

    def called(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if self.found or is_ours(path) or path == random.__file__:
            return None
        return self.line

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.found:
            return None
        if self.draws.some():
            self.found = self.last
            sys.settrace(None)  # it makes all calls slow
        elif event in ("line", "return"):  # behind a return its caller's line runs on
            self.last = user_line(frame if event == "line" else frame.f_back)
        return self.line


def warn_of_draws(again: Callable[[], Any]) -> None:
    """A capture has drawn; `again` runs the program once more, so that it is known where."""
    follower, before = _DrawnLine(), sys.gettrace()
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
