"""Orders that a card would get: which stream waits for which, and that the host waits for nothing but gradients.

There need be no card: streams, events and tensors of one are played, and what they are told is written down.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbpflow.nn.graph.host import copies, states
from sbpflow.nn.graph.host.copies import Copies
from sbpflow.nn.graph.host.states import StateMemory
from sbpflow.sbp.logical import OffloadPlace

CARD = torch.device("cuda", 0)


class OnCard(torch.Tensor):
    """A tensor that says it is on a card."""

    told: list[str]
    is_cpu = False
    device = CARD

    def record_stream(self, stream: Any) -> None:
        OnCard.told.append(f"kept for {stream.name}")


class Played:
    """A stream or an event."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, CARD

    def wait_stream(self, other: "Played") -> None:
        OnCard.told.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Played") -> None:
        OnCard.told.append(f"{self.name} waits for {event.name}")

    def record(self, stream: "Played") -> None:
        self.name = f"event of {stream.name}"

    def synchronize(self) -> None:
        OnCard.told.append(f"host waits for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    OnCard.told = []
    compute, streams = Played("compute"), dict[str, Played]()
    new = torch.empty

    def empty(*args: Any, device: Any = None, **how: Any) -> Any:
        made = new(*args, **how)
        return made if device is None else made.as_subclass(OnCard)

    def recorded(stream: Played) -> Played:
        event = Played("event")
        event.record(stream)
        return event

    for module in (copies, states):
        card = SimpleNamespace(empty=empty, uint8=torch.uint8, no_grad=torch.no_grad, Tensor=torch.Tensor)
        monkeypatch.setattr(module, "torch", card)
        monkeypatch.setattr(module, "current_stream", lambda _: compute)
        monkeypatch.setattr(module, "on_stream", lambda _: nullcontext())
        monkeypatch.setattr(module, "recorded", recorded)
        monkeypatch.setattr(module, "side_stream", lambda _, use: streams.setdefault(use, Played(use)))
        monkeypatch.setattr(module, "empty", lambda shape, dtype, pinned: new(tuple(shape), dtype=dtype))
    return OnCard.told


def on_card(*shape: int) -> Any:
    return torch.randn(*shape).as_subclass(OnCard)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.as_subclass(torch.Tensor)


def test_copies_to_memory_wait_on_streams_alone(log: list[str]) -> None:
    out, x = Copies("cpu", "x"), on_card(4, 5).t()
    away = out.stow([x])
    assert log == ["offload out waits for compute", "kept for offload out"]
    log.clear()
    coming = away.fetch()
    assert log == ["offload back waits for event of offload out", "offload back waits for event of compute"]
    log.clear()
    (back,) = coming.wait()
    assert log == ["compute waits for event of offload back", "kept for compute"]
    assert torch.equal(plain(back), plain(x))
    assert back.stride() == x.stride()
    del away, coming
    log.clear()
    out.stow([on_card(4, 5)])  # into the same memory, behind the way back from it
    assert "offload out waits for event of offload back" in log


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_values_survive_memory_that_is_used_again(log: list[str], to: OffloadPlace) -> None:
    out = Copies(to, "x")
    for _ in range(3):
        given = [on_card(3), on_card(7), on_card(0), on_card(3)]
        away = out.stow(given)
        coming = away.fetch()
        del away
        for x, back in zip(given, coming.wait(), strict=True):
            assert torch.equal(plain(x), plain(back))
        del coming, back
    assert log


def test_the_host_waits_for_gradients_and_for_nothing_twice(log: list[str]) -> None:
    memory, grad = StateMemory("cpu", "w", (0,), None), on_card(3)
    (first,) = memory.brought([grad])
    assert log == ["offload out waits for compute", "kept for offload out"]
    memory.arrive()
    assert log[2:] == ["host waits for event of offload out"]
    memory.arrive()
    assert len(log) == 3
    assert torch.equal(first, plain(grad))
    assert memory.brought([on_card(3)])[0] is first  # one buffer for all steps
