"""The record: every boxing that happened inside `with record() as moves`, and from which line of the user's code.

>>> from ..placement import placement
>>> with record() as moves:
...     pass
>>> print(moves)
nothing moved
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..placement.errors import ASKED, is_ours, user_line
from ..placement.moved import MovedName
from .boxing import Boxing
from .figures import user_path, volume
from .html import paragraph, table

__all__ = ["Asker", "Moved", "Moves", "asked", "asker", "following", "note", "record", "is_ours", "user_line"]

_open: list["Moves"] = []
_purpose: list[str] = []  # what a move is for that no user asked for
_inside: list[nn.Module] = []  # the modules that are being called while records are open


class Asker(NamedTuple):
    """For whom something moves: a line of the user's, and a layer or parameter by its path, where one is known."""

    line: str
    layer: str = ""


@dataclass(frozen=True)
class Moved:
    """One boxing: what was asked, the way it took, and who asked. Bytes are those that the busiest rank receives.

    A backward move was asked for by the layer whose forward made it, and not by the line that calls `backward()`.
    """

    op: str
    boxing: Boxing
    line: str
    layer: str = ""

    if not TYPE_CHECKING:
        plan = MovedName("sbpflow.boxing.record.Moved.plan")

    @property
    def route(self) -> str:
        return self.boxing.route

    @property
    def bytes(self) -> int:
        return self.boxing.bytes

    def __str__(self) -> str:
        src, dst = self.boxing.src, self.boxing.dst
        there = "" if src.placement is dst.placement else f" on {dst.placement}"
        layer = f" in {self.layer}" if self.layer else ""
        return f"{self.op}  {src.lie} -> {dst.lie}{there}  {self.route}  {self.bytes} bytes  {self.line}{layer}"


class Moves(list[Moved]):
    """Moves that a record collects; prints as a line a move, and their totals."""

    @property
    def bytes(self) -> int:
        """Bytes that the busiest ranks received, all moves together."""
        return sum(move.bytes for move in self)

    def __str__(self) -> str:
        if not self:
            return "nothing moved"
        sent = sum(move.boxing.total for move in self)
        return "\n".join([*map(str, self), f"{len(self)} moves: {self.bytes} bytes to a rank, {sent} sent in all"])

    def _repr_html_(self) -> str:
        rows = [
            (move.op, f"{move.boxing.src.lie} -> {move.boxing.dst.lie}", move.route, volume(move.bytes), move.layer,
             user_path(move.line))
            for move in self
        ]  # fmt: skip
        said = str(self).splitlines()[-1] if self else "nothing moved"
        head = ("", "from -> to", "route", "a rank", "layer", "line")
        return table(head, rows, (3,)) + paragraph(said) if self else paragraph(said)


@contextmanager
def record() -> Iterator[Moves]:
    """Collect every boxing until the block ends; records may be nested, and each sees all."""
    moves = Moves()
    _open.append(moves)
    hooks = [] if len(_open) > 1 else _followed()
    try:
        yield moves
    finally:
        _open[:] = [m for m in _open if m is not moves]
        for hook in hooks:
            hook.remove()


@contextmanager
def asked() -> Iterator[None]:
    """The user's line: what threads move meanwhile was asked for here."""
    if not _open:
        yield
        return
    ASKED.append(user_line())
    try:
        yield
    finally:
        ASKED.pop()


@contextmanager
def comparing(what: str) -> Iterator[None]:
    """Moves in here are made by ranks that compare this; those that ask for another move meanwhile are told so."""
    _purpose.append(f"comparing {what}, ")
    try:
        yield
    finally:
        _purpose.pop()


def purpose() -> str:
    return _purpose[-1] if _purpose else ""


def _followed() -> list[Any]:
    """Have modules tell when they are called."""
    _inside.clear()

    def enter(module: nn.Module, args: Any) -> None:
        _inside.append(module)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        if module in _inside:  # it may have been entered before the record was open
            del _inside[_inside.index(module) :]

    return [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]


def following() -> bool:
    """Whether modules tell a record when they are called, by one global hook before and one after."""
    return bool(_open)


def _layer() -> str:
    """The path of the module that is being called, from the outermost one."""
    path = ""
    for outer, inner in pairwise(_inside):
        name = next((name for name, module in outer.named_modules() if module is inner), type(inner).__name__)
        path = f"{path}.{name}" if path else name
    return path


def asker() -> Asker | None:
    """The asker now, None where no record is open."""
    return Asker(user_line(), _layer()) if _open else None


def note(op: str, boxing: Boxing, by: Asker | None = None) -> None:
    """Tell the open records of a boxing; `by` is its asker, if that is not the caller."""
    if _open:
        moved = Moved(op, boxing, *(by or Asker(user_line(), _layer())))
        for moves in _open:
            moves.append(moved)
