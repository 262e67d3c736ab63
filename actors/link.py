"""Links: how the values of one register travel between processes, as posted sends and receives.

Gloo's send is over when a posted receive has taken it, so the producer's slot is free when the send is done; and a
receive is posted when its register has a free slot. So the slots of a register bound what is under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from ..placement.errors import ScheduleError
from .desk import Firing

__all__ = ["Broken", "GlooLine", "Line", "Link", "Receive", "Send", "TensorLink", "Waits", "tag_of", "token"]

LABELS = 1 << 16  # after so many a tag comes again; slots are far fewer
REGISTERS = 1 << 15
AHEAD = 1  # receives that are posted beyond the one waited for; each is a buffer that nothing lies in yet
FOREVER = timedelta(days=30)  # waits are ended by whoever watches over the step


class Broken(Exception):
    """A connection that broke under a message; why, the bus finds out."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(f"the connection to rank {peer} broke: {said}")
        self.peer = peer


class Waits(Protocol):
    """Something under way; `wait` returns when it is over."""

    def wait(self) -> object: ...


def tag_of(number: int, label: int) -> int:
    """The tag of what goes in a register's slot with this label."""
    return number * LABELS + label % LABELS


class Link(Protocol):
    """How the values of one register travel, for this rank."""

    def send(self, label: int, value: Any) -> Sequence[Waits]:
        """Post what this rank sends."""

    def receive(self, label: int) -> tuple[Sequence[Waits], Callable[[], Any]]:
        """Post what this rank receives; once that is there, the second gives the value."""


class Line(Protocol):
    """How messages get to other ranks and from them."""

    def send(self, peer: int, tag: int, tensor: Tensor) -> Waits: ...

    def receive(self, peer: int, tag: int, tensor: Tensor) -> Waits: ...


class GlooLine:
    """The connections among some ranks, apart from those that others use: a ProcessGroupGloo, called directly."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group = group
        self.place = {rank: at for at, rank in enumerate(ranks)}

    def send(self, peer: int, tag: int, tensor: Tensor) -> "Posted":
        try:
            return Posted(peer, self.group.send([tensor], self.place[peer], tag), tensor)
        except RuntimeError as error:
            raise Broken(peer, str(error)) from error

    def receive(self, peer: int, tag: int, tensor: Tensor) -> "Posted":
        try:
            return Posted(peer, self.group.recv([tensor], self.place[peer], tag), tensor)
        except RuntimeError as error:
            raise Broken(peer, str(error)) from error


@dataclass(frozen=True, slots=True)
class Posted:
    """A message under way, and the tensor that it is read from or written to meanwhile."""

    peer: int
    work: Any
    tensor: Tensor

    def wait(self) -> None:
        try:
            self.work.wait(FOREVER)
        except RuntimeError as error:
            raise Broken(self.peer, str(error)) from error


def _only(tensors: list[Tensor]) -> Any:
    return tensors[0]


@dataclass(frozen=True)
class TensorLink:
    """A register whose values are tensors. `number` is the register's, the same on all ranks.

    `sends` has a peer and what to send it of a value, without gaps in memory; `receives` a peer and an empty tensor for
    what it sends; `finish` makes the value of all that arrived.
    """

    line: Line
    number: int
    sends: tuple[tuple[int, Callable[[Any], Tensor]], ...] = ()
    receives: tuple[tuple[int, Callable[[], Tensor]], ...] = ()
    finish: Callable[[list[Tensor]], Any] = _only

    def __post_init__(self) -> None:
        if not 0 <= self.number < REGISTERS:
            raise ScheduleError(f"register {self.number} has no tag\n  a network is cut at {REGISTERS} at most")

    def tag(self, label: int) -> int:
        return tag_of(self.number, label)

    def send(self, label: int, value: Any) -> Sequence[Waits]:
        tag = self.tag(label)
        return [self.line.send(peer, tag, pack(value)) for peer, pack in self.sends]

    def receive(self, label: int) -> tuple[Sequence[Waits], Callable[[], Any]]:
        tag = self.tag(label)
        tensors = [empty() for _, empty in self.receives]
        works = [self.line.receive(peer, tag, t) for (peer, _), t in zip(self.receives, tensors, strict=True)]
        return works, lambda: self.finish(tensors)


def token(line: Line, number: int, *, to: Sequence[int] = (), of: Sequence[int] = ()) -> TensorLink:
    """A link of a register without values: a byte says that a slot is filled."""

    def byte(value: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    return TensorLink(line, number, tuple((r, byte) for r in to), tuple((r, byte) for r in of), lambda tensors: None)


class Send:
    """The work of an actor that sends what it takes."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.works: Sequence[Waits] = ()

    def begin(self, firing: Firing, free: int) -> None:
        label, value = firing.held[0][0]
        self.works = self.link.send(label, value)

    def __call__(self, firing: Firing) -> Sequence[Any]:
        works, self.works = self.works, ()
        for work in works:
            work.wait()
        return ()


class Receive:
    """The work of an actor that gives what arrives; `firings` times a step."""

    arrives = True  # whoever needs it may wait for it

    def __init__(self, link: Link, firings: int) -> None:
        self.link, self.firings = link, firings
        self.posted: dict[int, tuple[Sequence[Waits], Callable[[], Any]]] = {}

    def begin(self, firing: Firing, free: int) -> None:
        if not firing.turn:
            self.posted.clear()  # of a step that failed
        for turn in range(firing.turn, min(self.firings, firing.turn + 1 + min(free, AHEAD))):
            if turn not in self.posted:
                self.posted[turn] = self.link.receive(turn)

    def __call__(self, firing: Firing) -> Sequence[Any]:
        works, value = self.posted.pop(firing.turn)
        for work in works:
            work.wait()
        return (value(),)
