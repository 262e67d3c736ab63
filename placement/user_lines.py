"""The user's lines: from where in the user's code something was asked, for errors and records."""

import contextlib
import functools
import sys
import threading
from pathlib import Path
from types import FrameType

import torch

__all__ = ["ASKED", "is_ours", "user_line"]

ROOMS = str(Path(__file__).resolve().parent.parent)
PRIVATE = (
    *(f"{ROOMS}/{room}/" for room in ("sbpflow", "placement", "sbp", "boxing", "actors", "nn")),
    f"{Path(torch.__file__).resolve().parent}/",  # autograd calls back from there
    contextlib.__file__,
    functools.__file__,  # what is worked out when it is first asked for
    threading.__file__,
)
ASKED: list[str] = []  # from where threads were set to work


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line outside this package and torch, as file:line; of the caller, or of a frame of any thread.

    >>> user_line().rpartition(":")[2].isdigit()
    True
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if ASKED and is_ours(frame.f_code.co_filename):
        return ASKED[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_known: dict[str, bool] = {}


def is_ours(path: str) -> bool:
    """Whether a file is of this package, torch, or what these call back from."""
    known = _known.get(path)
    if known is None:
        whole = str(Path(path).resolve()) if not path.startswith("<") else path
        known = _known[path] = whole.startswith(PRIVATE)
    return known
