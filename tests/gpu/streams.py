"""A stand-in for CUDA's streams and events that knows what each stream has waited for, where there is no card.

A stream counts what it was given, and knows how far it has waited for each other one; an event carries what its stream
knew when it was recorded. A value is read well only on a stream that knows of its making: what on a card is a race that
shows now and then is an error here, every time. `Card.log` has the waits in the order in which they were asked for.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["Card", "ReadTooEarly"]


class ReadTooEarly(AssertionError):
    """A stream reads what another may not have made yet."""


class Stream:
    def __init__(self, card: "Card", name: str) -> None:
        self.card, self.name = card, name
        self.knows: dict[str, int] = defaultdict(int)

    def wait_event(self, event: "Event") -> None:
        self.card.log.append(f"{self.name} waits for {event.of}")
        for name, count in event.knows.items():
            self.knows[name] = max(self.knows[name], count)

    def wait_stream(self, other: "Stream") -> None:
        event = Event(self.card)
        event.record(other)
        self.wait_event(event)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Event:
    def __init__(self, card: "Card") -> None:
        self.card, self.of = card, ""
        self.knows: dict[str, int] = {}

    def record(self, stream: Stream) -> None:
        self.of, self.knows = stream.name, dict(stream.knows)

    def query(self) -> bool:
        return True


class Card:
    """Streams, and what they made. `write` and `read` stand for the kernels of an actor's work."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.made: dict[int, tuple[Tensor, str, int]] = {}
        self.count = 0
        self.here = threading.local()
        self.first = self.stream("the default stream")
        for kind in (torch.cpu, torch.cuda):  # what is written lies in the host's memory
            patch.setattr(kind, "Stream", lambda device=None: self.stream())
            patch.setattr(kind, "Event", lambda: Event(self), raising=False)
            patch.setattr(kind, "stream", self.on)
            patch.setattr(kind, "current_stream", lambda device=None: self.current())

    def stream(self, name: str = "") -> Any:
        self.count += 1
        return Stream(self, name or f"stream {self.count}")

    def current(self) -> Stream:
        found: Stream = getattr(self.here, "stream", self.first)
        return found

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.here.stream = self.current(), stream
        try:
            yield
        finally:
            self.here.stream = before

    def write(self, value: float) -> Tensor:
        made, stream = torch.tensor(value), self.current()
        stream.knows[stream.name] += 1
        self.made[id(made)] = made, stream.name, stream.knows[stream.name]
        return made

    def read(self, value: Tensor) -> float:
        _, name, count = self.made[id(value)]
        if self.current().knows[name] < count:
            raise ReadTooEarly(f"{self.current().name} reads what {name} may not have made yet; waits: {self.log}")
        return value.item()
