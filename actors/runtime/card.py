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
    """The communicator of one register, on a stream of its own, so that no register waits behind another."""

    def __init__(self, bus: Bus, number: int, ranks: Iterable[int], device: torch.device) -> None:
        from torch._C._distributed_c10d import PrefixStore

        members = sorted(ranks)
        self.place = {rank: at for at, rank in enumerate(members)}
        self.stream = side_stream(device, f"register {number}")
        store = PrefixStore(f"card/{number}/{'-'.join(map(str, members))}", bus.store)
        # Whoever watches over the step ends waits.
        self.group: Any = family(device.type).communicator(store, self.place[bus.rank], len(members), FOREVER)
        bus.hang_up.append(self.group.abort)

    def send(self, peer: int, tag: int, tensor: Tensor) -> "OnWire":
        return OnWire(peer, self._asked(self.group.send, peer, tag, tensor), tensor.nbytes)

    def receive(self, peer: int, tag: int, tensor: Tensor) -> "OnWire":
        return OnWire(peer, self._asked(self.group.recv, peer, tag, tensor), tensor.nbytes)

    def _asked(self, way: Callable[..., Any], peer: int, tag: int, tensor: Tensor) -> Any:
        try:
            return way([tensor], self.place[peer], tag)
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
