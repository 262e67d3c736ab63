"""Actors on CUDA: what goes from stream to stream, from the host and over NCCL is whole when it is read."""

import torch
from torch import Tensor

import sbpflow as flow
from sbpflow.actors.protocol.network import Actor, Give, Network, Register, Take
from sbpflow.actors.protocol.simulate import simulate
from sbpflow.actors.protocol.state import Firing
from sbpflow.actors.runtime.bus import bus
from sbpflow.actors.runtime.card import CardLine, CardLink, OnStream
from sbpflow.actors.runtime.channel import Link, TensorLink
from sbpflow.actors.runtime.job import Work
from sbpflow.actors.runtime.partition import cut
from sbpflow.actors.runtime.runtime import Runtime
from tests.gpu.shared_card import nccl_hosts
from tests.ranks import Fresh

SIZE = 1 << 20


def relay(firings: int) -> Network:
    actors = (Actor("a", "first", (), (Give("x"),), firings), Actor("b", "second", (Take("x"),)))
    return Network(actors, (Register("x", 2),), "relay")


def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def slow(label: int) -> Tensor:
    """A value that a card needs a while to make."""
    value = torch.full((SIZE,), float(label), device="cuda")
    for _ in range(200):
        value = value * 1.0
    return value


def test_a_value_is_whole_on_the_stream_that_reads_it() -> None:
    got: list[Tensor] = []

    def read(firing: Firing) -> None:
        got.append(firing.held[0][0].value.sum())

    work: dict[str, Work] = {
        "a": OnStream(lambda firing: [slow(firing.label)], stream()),
        "b": OnStream(read, stream()),
    }
    with Runtime(relay(8), work) as runtime:
        runtime.run()
    torch.cuda.synchronize()
    assert [value.item() for value in got] == [float(SIZE * label) for label in range(8)]


def card() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_tensors_go_over_nccl_between_ranks_that_share_a_card(fresh: Fresh) -> None:
    ends = fresh(2, over_nccl, timeout=70.0, environment=nccl_hosts)
    assert [end.answer and end.answer.value for end in ends] == [[], [float(SIZE * n) for n in range(6)] * 2]


def over_nccl() -> list[float]:
    flow.init(timeout=60)
    line = bus((0, 1))
    part = cut(simulate(relay(6)), {"first": 0, "second": 1}, line.rank)
    (edge,) = part.edges
    way = CardLine(line, edge.number, card())
    sends = ((1, lambda value: value),) if edge.sends else ()
    receives = () if edge.sends else ((0, lambda: torch.empty(SIZE, device="cuda")),)
    link: Link = CardLink(TensorLink(way, edge.number, sends, receives), way)
    got: list[Tensor] = []

    def read(firing: Firing) -> None:
        got.append(firing.held[0][0].value.sum())

    mine = stream()
    work: dict[str, Work] = {
        "a": OnStream(lambda firing: [slow(firing.label)], mine),
        "b": OnStream(read, mine),
        **part.work({edge.actor: link}),
    }
    with Runtime(part.network, work, guard=line) as runtime:
        runtime.run()
        runtime.run()
    torch.cuda.synchronize()
    found = [value.item() for value in got]
    flow.boxing.close()
    return found
