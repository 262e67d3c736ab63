"""The record: every boxing that happened inside `with record() as moves`, and from which line of the user's code.

>>> from ..placement import placement
>>> with record() as moves:
...     pass
>>> print(moves)
nothing moved
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from .plan import Plan

__all__ = ["Moved", "Moves", "asked", "note", "record", "user_line"]

ROOMS = str(Path(__file__).resolve().parent.parent)
PRIVATE = (
    *(f"{ROOMS}/{room}/" for room in ("sbpflow", "placement", "sbp", "boxing", "actors", "nn")),
    f"{Path(torch.__file__).resolve().parent}/",  # autograd calls back from there
    contextlib.__file__,
    functools.__file__,  # what is worked out when it is first asked for
    threading.__file__,
)
_open: list["Moves"] = []
_asked: list[str] = []  # from where threads were set to work


@dataclass(frozen=True)
class Moved:
    """One boxing: what was asked, the way it took, and who asked. Bytes are those that the busiest rank receives."""

    op: str
    plan: Plan
    line: str

    @property
    def route(self) -> str:
        return self.plan.route

    @property
    def bytes(self) -> int:
        return self.plan.bytes

    def __str__(self) -> str:
        src, dst = self.plan.src, self.plan.dst
        there = "" if src.placement is dst.placement else f" on {dst.placement}"
        return f"{self.op}  {src.lie} -> {dst.lie}{there}  {self.route}  {self.bytes} bytes  {self.line}"


class Moves(list[Moved]):
    """What a record collects; prints as a line a move."""

    @property
    def bytes(self) -> int:
        """Bytes that the busiest ranks received, all moves together."""
        return sum(move.bytes for move in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing moved"


@contextlib.contextmanager
def record() -> Iterator[Moves]:
    """Collect every boxing until the block ends; records may be nested, and each sees all."""
    moves = Moves()
    _open.append(moves)
    try:
        yield moves
    finally:
        _open[:] = [m for m in _open if m is not moves]


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """What threads move meanwhile was asked for here."""
    if not _open:
        yield
        return
    _asked.append(user_line())
    try:
        yield
    finally:
        _asked.pop()


def note(op: str, plan: Plan) -> None:
    """Tell the open records of a boxing."""
    if _open:
        moved = Moved(op, plan, user_line())
        for moves in _open:
            moves.append(moved)


def user_line(frame: FrameType | None = None) -> str:
    """The innermost line outside this package and torch, as file:line; of the caller, or of a frame of any thread.

    >>> user_line().rpartition(":")[2].isdigit()
    True
    """
    frame = frame or sys._getframe(1)
    while frame.f_back is not None and _ours(frame.f_code.co_filename):
        frame = frame.f_back
    if _asked and _ours(frame.f_code.co_filename):
        return _asked[-1]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_known: dict[str, bool] = {}


def _ours(path: str) -> bool:
    known = _known.get(path)
    if known is None:
        whole = str(Path(path).resolve()) if not path.startswith("<") else path
        known = _known[path] = whole.startswith(PRIVATE)
    return known
