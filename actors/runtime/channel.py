"""Channels: how the values of one register travel between processes, as posted sends and receives.

Gloo's send is over when a posted receive has taken it, so the producer's slot is free when the send is done; and a
receive is posted when its register has a free slot. So the slots of a register bound what is under way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ...placement.errors import ScheduleError
from ..protocol.feasibility import Travel
from ..protocol.state import Firing

__all__ = [
    "Broken",
    "GlooLine",
    "Carrier",
    "Link",
    "Receive",
    "Send",
    "TensorLink",
    "UnderWay",
    "ahead",
    "bytes_of",
    "tag_of",
    "token",
]

LABELS = 1 << 16  # after so many a tag comes again; slots are far fewer
REGISTERS = 1 << 15
AHEAD = 1  # receives that are posted beyond the one waited for; each is a buffer that nothing lies in yet
SMALL, MANY = 1 << 18, 8  # bytes, and receives: so many small ones may be posted
VAST = 1 << 60  # bytes
AT_ONCE = 20e-6  # seconds; a wait that is over sooner was for something that had been there
FOREVER = timedelta(days=30)  # waits are ended by whoever watches over the step


class Broken(Exception):
    """A connection that broke under a message; why, the bus finds out."""

    def __init__(self, peer: int, said: str) -> None:
        super().__init__(f"the connection to rank {peer} broke: {said}")
        self.peer = peer


class UnderWay(Protocol):
    """Something under way; `wait` returns when it is over."""

    def wait(self) -> object: ...


def tag_of(number: int, label: int) -> int:
    """The tag of what goes in a register's slot with this label."""
    return number * LABELS + label % LABELS


class Link(Protocol):
    """The link on which the values of one register travel, for this rank."""

    def send(self, label: int, value: Any) -> Sequence[UnderWay]:
        """Post what this rank sends."""

    def receive(self, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        """Post what this rank receives; once that is there, the second gives the value."""


class Carrier(Protocol):
    """A carrier of messages to other ranks and from them, which lie on its device."""

    device: torch.device

    def send(self, peer: int, tag: int, tensor: Tensor) -> UnderWay: ...

    def receive(self, peer: int, tag: int, tensor: Tensor) -> UnderWay: ...


class GlooLine:
    """The connections among some ranks, apart from those that others use: a ProcessGroupGloo, called directly."""

    device = torch.device("cpu")

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group = group
        self.place = {rank: at for at, rank in enumerate(ranks)}

    def send(self, peer: int, tag: int, tensor: Tensor) -> "Posted":
        try:
            return _new(Posted, (peer, self.group.send([tensor], self.place[peer], tag), tensor))
        except RuntimeError as error:
            raise Broken(peer, str(error)) from error

    def receive(self, peer: int, tag: int, tensor: Tensor) -> "Posted":
        try:
            return _new(Posted, (peer, self.group.recv([tensor], self.place[peer], tag), tensor))
        except RuntimeError as error:
            raise Broken(peer, str(error)) from error


class Posted(NamedTuple):
    """A message under way, and the tensor that it is read from or written to meanwhile."""

    peer: int
    work: Any
    tensor: Tensor

    @property
    def bytes(self) -> int:
        return self.tensor.nbytes

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

    line: Carrier
    number: int
    sends: tuple[tuple[int, Callable[[Any], Tensor]], ...] = ()
    receives: tuple[tuple[int, Callable[[], Tensor]], ...] = ()
    finish: Callable[[list[Tensor]], Any] = _only

    def __post_init__(self) -> None:
        if not 0 <= self.number < REGISTERS:
            raise ScheduleError(f"register {self.number} has no tag\n  a network is cut at {REGISTERS} at most")

    def tag(self, label: int) -> int:
        return tag_of(self.number, label)

    def send(self, label: int, value: Any) -> Sequence[UnderWay]:
        tag = self.tag(label)
        return [self.line.send(peer, tag, pack(value)) for peer, pack in self.sends]

    def receive(self, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        tag = self.tag(label)
        tensors = [empty() for _, empty in self.receives]
        works = [self.line.receive(peer, tag, t) for (peer, _), t in zip(self.receives, tensors, strict=True)]
        return works, lambda: self.finish(tensors)


def token(line: Carrier, number: int, *, to: Sequence[int] = (), of: Sequence[int] = ()) -> TensorLink:
    """A link of a register without values: a byte says that a slot is filled."""

    def byte(value: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8, device="cpu")

    return TensorLink(line, number, tuple((r, byte) for r in to), tuple((r, byte) for r in of), lambda tensors: None)


class Send:
    """The work of an actor that sends what it takes. What fills a slot is posted at once, and waited for in turn.

    Several threads may wait; what one has waited for is over for all.
    """

    travel: ClassVar[Travel] = "send"

    def __init__(self, link: Link) -> None:
        self.link = link
        self.posting, self.waiting = Lock(), Lock()
        self.posted: dict[
            int, tuple[Sequence[UnderWay], int, float, float]
        ] = {}  # bytes, and when it was begun and left
        self.begun: set[int] = set()  # the labels of what was ever posted; a schedule may count backwards
        self.put = self.gone = 0  # bytes of what was posted, and of what of that was waited for
        self.spans: dict[int, tuple[float, float]] = {}

    def start(self) -> None:
        """A step begins; what one that failed left is forgotten."""
        self.posted.clear()
        self.begun.clear()
        self.spans.clear()
        self.put = self.gone = 0

    def post(self, label: int, value: Any) -> None:
        """Begin to send, if that was not done before."""
        with self.posting:
            if label not in self.begun:
                start = perf_counter()
                works = self.link.send(label, value)
                nbytes = bytes_of(works)
                self.posted[label] = works, nbytes, start, perf_counter()
                self.begun.add(label)
                self.put += nbytes

    def wait(self, label: int) -> None:
        """Wait until it is gone, if nobody has."""
        if label not in self.posted:  # it may be gone while another thread waits for a later one
            return
        with self.waiting:
            sent = self.posted.get(label)
            if sent is None:
                return
            works, nbytes, start, left = sent
            since = perf_counter()
            for work in works:
                work.wait()
            end = perf_counter()
            self.gone += nbytes
            # What was over before anybody waited ended no one knows when; it is shown as long as it took to post it.
            self.spans[label] = start, end if end - since > AT_ONCE else left
            del self.posted[label]

    def __call__(self, firing: Firing) -> Sequence[Any]:
        if firing.held:
            self.post(*firing.held[0][0])
        self.wait(firing.label)
        return ()

    def span(self, label: int) -> tuple[float, float]:
        """From when to when a message was under way."""
        return self.spans.pop(label)


class Receive:
    """The work of an actor that gives what arrives; `firings` times a step."""

    travel: ClassVar[Travel] = "receive"

    def __init__(self, link: Link, firings: int) -> None:
        self.link, self.firings = link, firings
        self.posting = Lock()
        self.posted: dict[int, tuple[Sequence[UnderWay], Callable[[], Any], float]] = {}
        self.next = 0  # what comes before it is posted
        self.most = 0  # that are posted and not waited for; known with the size of the first
        self.last = 0.0, 0.0

    def start(self) -> None:
        """A step begins; what one that failed left is forgotten."""
        self.posted.clear()
        self.next = 0

    def post(self, fired: int, room: int) -> None:
        """Begin to receive what comes after the first `fired`, for which there are `room` slots, if not done before."""
        end = min(self.firings, fired + min(room, self.most or 1 + AHEAD))
        if self.next >= end:
            return
        with self.posting:
            while self.next < end:
                since = perf_counter()
                works, value = self.link.receive(self.next)
                self.posted[self.next] = works, value, since
                self.next += 1
                self.most = self.most or ahead(bytes_of(works))

    def wait(self, turn: int) -> Any:
        """The value of this turn, when it is there."""
        works, value, since = self.posted.pop(turn)
        for work in works:
            work.wait()
        self.last = since, perf_counter()
        return value()

    def __call__(self, firing: Firing) -> Sequence[Any]:
        self.post(firing.turn, 1)
        return (self.wait(firing.turn),)

    def span(self, label: int) -> tuple[float, float]:
        """From when to when the last message was under way."""
        return self.last


def ahead(nbytes: int) -> int:
    """The most receives of so many bytes that are posted and not waited for."""
    return max(1 + AHEAD, min(MANY, SMALL // max(nbytes, 1)))


def bytes_of(works: Sequence[UnderWay]) -> int:
    """The bytes of messages; one that does not say them counts as more than anything."""
    return sum([getattr(work, "bytes", VAST) for work in works])


_new = tuple.__new__  # half as long as Posted(...)
