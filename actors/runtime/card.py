"""Actors on cards: streams and events in the place of waits on the host.

An actor's work puts kernels on a stream and returns before they ran. So a value comes with the event behind which it is
there; who reads it has its own stream wait for that, and the host never does. Only a send is watched to its end, by the
thread of its link: before that the slot that it reads is not free.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...placement.device import family, on_stream, recorded, side_stream
from ...placement.structure import leaves
from ..protocol.state import Firing
from .bus import Bus
from .channel import Broken, Link, UnderWay, bytes_of
from .job import Work

__all__ = ["CardLine", "CardLink", "Later", "OnStream", "OnWire"]

POLL = 20e-6  # seconds between looks at an event
FOREVER = timedelta(days=30)


class Later(NamedTuple):
    """A value that is there once the event has happened on its stream."""

    value: Any
    event: Any

    def on(self, stream: Any) -> Any:
        """The value for work on this stream; its memory is not given away before that has read it."""
        stream.wait_event(self.event)
        for tensor in leaves(self.value, Tensor):
            if not tensor.is_cpu:
                tensor.record_stream(stream)
        return self.value


def _later(value: Any, stream: Any) -> Later:
    """A value that is there after all that the stream has got so far."""
    return Later(value, recorded(stream))


def _now(value: Any, stream: Any) -> Any:
    return value.on(stream) if isinstance(value, Later) else value


class OnStream:
    """Work whose kernels go to a stream: takes are waited for there, and what it gives comes with an event."""

    def __init__(self, work: Work, stream: Any) -> None:
        self.work, self.stream = work, stream

    def __call__(self, firing: Firing) -> Sequence[Any] | None:
        with on_stream(self.stream):
            held = tuple(
                tuple(slot._replace(value=_now(slot.value, self.stream)) for slot in slots) for slots in firing.held
            )
            given = self.work(firing._replace(held=held))
            if given is None:
                return None
            return [None if value is None else _later(value, self.stream) for value in given]


class CardLine:
    """The messages of one register over a backend of cards, on a stream of their own: no register waits for another."""

    def __init__(self, bus: Bus, number: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self.place = {rank: at for at, rank in enumerate(bus.ranks)}
        self.device, self.stream = device, side_stream(device, f"register {number}")
        # Of all ranks, though few of them meet: that all name alike, and each network otherwise, since what ranks left
        # in the store for an earlier one is still there. Whoever watches over the step ends waits.
        store = PrefixStore(f"card/{bus.agreed}/{number}", bus.store)
        self.group: Any = family(device.type).communicator(store, self.place[bus.rank], len(bus.ranks), FOREVER)
        bus.hang_up.append(self.group.abort)

    def meet(self, peers: Iterable[int]) -> None:
        """Make the communicators with these peers, all of whom do the same.

        Two ranks make theirs at their first message, and wait for each other in it. In a step one might wait in that of
        a register and the other in that of another, for ever; so they are made before, in the order of registers and
        of ranks, which is the same everywhere.
        """
        with on_stream(self.stream):
            hello = torch.zeros(1, dtype=torch.uint8, device=self.device)
            for peer in sorted(peers):
                first = self.place[peer] > self.group.rank()
                (self.send if first else self.receive)(peer, 0, hello).wait()

    def send(self, peer: int, tag: int, tensor: Tensor) -> "OnWire":
        return OnWire(peer, self._asked(self.group.send, peer, tag, tensor), tensor.nbytes)

    def receive(self, peer: int, tag: int, tensor: Tensor) -> "OnWire":
        return OnWire(peer, self._asked(self.group.recv, peer, tag, tensor), tensor.nbytes)

    def _asked(self, way: Callable[..., Any], peer: int, tag: int, tensor: Tensor) -> Any:
        try:
            # As bytes, since backends lack some dtypes.
            return way([tensor.reshape(-1).view(torch.uint8)], self.place[peer], tag)
        except RuntimeError as error:
            raise Broken(peer, str(error)) from error


@dataclass(frozen=True, slots=True)
class OnWire:
    """A message that a stream carries; `wait` has the current stream wait for it, not the host."""

    peer: int
    work: Any
    bytes: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise Broken(self.peer, str(error)) from error


@dataclass(frozen=True, slots=True)
class StreamMessages:
    """Messages for which streams wait and the host does not; by their bytes it is known how many may be posted."""

    bytes: int

    def wait(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Gone:
    """Messages that are over when an event has happened; the host looks at it, on the thread of the link."""

    peer: int
    there: Later  # what is sent is kept until then

    def wait(self) -> None:
        try:
            while not self.there.event.query():
                time.sleep(POLL)
        except RuntimeError as error:
            raise Broken(self.peer, str(error)) from error


@dataclass(frozen=True)
class CardLink:
    """A link of tensors on a card. What arrives is a `Later`; a send is over when the card has done it.

    `peer` is whom an error names.
    """

    link: Link
    line: CardLine
    peer: int = -1

    def send(self, label: int, value: Any) -> Sequence[UnderWay]:
        stream = self.line.stream
        with on_stream(stream):
            for message in self.link.send(label, _now(value, stream)):
                message.wait()
            return [Gone(self.peer, _later(value, stream))]

    def receive(self, label: int) -> tuple[Sequence[UnderWay], Callable[[], Any]]:
        stream = self.line.stream
        with on_stream(stream):
            works, value = self.link.receive(label)
            for message in works:
                message.wait()
            there = _later(value(), stream)
        return [StreamMessages(bytes_of(works))], lambda: there
