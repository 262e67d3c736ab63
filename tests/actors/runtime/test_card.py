"""Actors on CUDA, where there is none: who reads what another stream makes has waited for its event."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.runtime import card as cards
from sbpflow.actors.runtime.card import CardLine, CardLink, Later, OnStream, OnWire
from sbpflow.actors.runtime.channel import Receive
from sbpflow.actors.runtime.job import Work
from sbpflow.actors.runtime.runtime import Runtime
from tests.gpu.streams import Card, ReadTooEarly


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def relayed(card: Card, queues: tuple[str, str, str]) -> list[float]:
    """Numbers that go through three actors, each on a stream of its own."""
    actors = (
        Actor("a", queues[0], (), (Give("x"),), 6),
        Actor("b", queues[1], (Take("x"),), (Give("y"),)),
        Actor("c", queues[2], (Take("y"),)),
    )
    network = Network(actors, (Register("x", 2), Register("y", 2)), "relay")
    got: list[float] = []
    work: dict[str, Work] = {
        "a": OnStream(lambda firing: [card.write(float(firing.label))], card.stream("a")),
        "b": OnStream(lambda firing: [card.write(card.read(firing.held[0][0].value) + 1)], card.stream("b")),
        "c": OnStream(lambda firing: got.append(card.read(firing.held[0][0].value)), card.stream("c")),
    }
    with Runtime(network, work, timeout=20) as runtime:
        runtime.run()
    return got


@pytest.mark.parametrize("queues", [("q", "q", "q"), ("q", "r", "s")], ids=["one_thread", "three_threads"])
def test_every_reader_waits_for_the_event_of_what_it_reads(card: Card, queues: tuple[str, str, str]) -> None:
    assert relayed(card, queues) == [float(n + 1) for n in range(6)]
    assert sorted({*card.log}) == ["b waits for a", "c waits for b"]
    assert len(card.log) == 12


def forgets_to_wait(later: Later, stream: Any) -> Any:
    return later.value


def test_a_wait_that_is_left_out_is_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Later, "on", forgets_to_wait)
    with pytest.raises(ReadTooEarly, match="b reads what a may not have made yet"):
        relayed(card, ("q", "q", "q"))


def test_an_event_recorded_too_early_is_seen(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event says what its stream had been given until then, and nothing of what it is given later."""
    early = cards._later(None, card.stream("nothing yet"))
    monkeypatch.setattr(cards, "_later", lambda value, stream: Later(value, early.event))
    with pytest.raises(ReadTooEarly):
        relayed(card, ("q", "q", "q"))


class Wire:
    """A message that is in time when the stream that carries it waited for what it sends."""

    def wait(self) -> None:
        return None


class Pipe:
    """A link of tensors, which works on the current stream."""

    def __init__(self, card: Card) -> None:
        self.card, self.sent = card, list[float]()

    def send(self, label: int, value: Tensor) -> Sequence[Wire]:
        self.sent.append(self.card.read(value))
        return [Wire()]

    def receive(self, label: int) -> tuple[Sequence[Wire], Callable[[], Tensor]]:
        return [Wire()], lambda: self.card.write(self.sent[label])


def test_a_link_sends_what_is_there_and_gives_what_its_reader_must_wait_for(card: Card) -> None:
    line = CardLine.__new__(CardLine)  # without the communicator that it opens
    line.stream = card.stream("wire")
    link = CardLink(Pipe(card), line)
    maker, reader = card.stream("maker"), card.stream("reader")
    with card.on(maker):
        value = card.write(7.0)
    (gone,) = link.send(0, cards._later(value, maker))
    gone.wait()
    _, arrived = link.receive(0)
    with card.on(reader):
        with pytest.raises(ReadTooEarly, match="reader reads what wire"):
            card.read(arrived().value)
        assert card.read(arrived().on(card.here.stream)) == 7.0
    assert card.log == ["wire waits for maker", "reader waits for wire"]


class Sized(Pipe):
    """A link whose messages say how large they are."""

    def receive(self, label: int) -> tuple[Sequence[Any], Callable[[], Tensor]]:
        return [OnWire(0, Wire(), 1 << 20)], lambda: self.card.write(0.0)


def test_large_receives_are_not_posted_far_ahead_on_a_card(card: Card) -> None:
    """Each holds its buffer from then on: it is one beside that which is waited for, as on CPU."""
    line = CardLine.__new__(CardLine)
    line.stream = card.stream("wire")
    receive = Receive(CardLink(Sized(card), line), 16)
    receive.post(0, 16)
    receive.post(0, 16)
    assert len(receive.posted) == 2
