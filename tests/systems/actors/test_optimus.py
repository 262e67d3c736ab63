"""Optimus: an encoder's forwards and backwards run in the bubbles of a pipeline, and train as if there was none."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import Actor, Added, Costs, Give, Network, Register, Take, hidden, network_of, published, simulate
from sbpflow.actors.protocol.state import Firing
from tests.ranks import Ranks

STAGES, MANY, ROWS, WIDTH = 4, 8, 2, 6
LAST = 9  # a kind: whatever else a device has to do goes first


def pipeline() -> Network:
    schedule = published("1f1b")
    return network_of(schedule, schedule.shape(STAGES, MANY), Costs(forward=1, backward=1, weight=1))


@pytest.mark.parametrize("work", [0, 1, 5, 8, 9, 10, 20])
def test_as_much_is_hidden_as_there_is_bubble(work: int) -> None:
    """On each device, ops of one unit each; the step's own actors are done when they were."""
    before = pipeline()
    alone = simulate(before)
    ops = [Actor(f"op {s}", f"device {s}", firings=work, time=1, kind=LAST) for s in range(STAGES)] if work else []
    run = simulate(before.adding(ops))
    for stage in range(STAGES):
        queue = f"device {stage}"
        idle = alone.end - alone.busy(queue)
        assert idle == 9
        assert hidden(before, run)[queue] == min(idle, work)
        mine = {ran for ran in run.of(queue) if not ran.actor.startswith("op")}
        assert mine == set(alone.of(queue))  # at the same times


def encoding(network: Network, forward: float = 0.0, backward: float = 0.0) -> Network:
    """With an encoder on the last device, which waits longest for its first forward: `encode` makes what F0 reads, and
    `connect` hands the gradient of what comes behind on to `back`."""
    last = f"device {STAGES - 1}"
    encode = Actor("encode", last, gives=(Give("features"), Give("kept")), firings=MANY, time=forward, kind=LAST)
    connect = Actor("connect", "device 0", (Take("dy.0"),), (Give("gradient"),), kind=-1)  # short
    back = Actor("back", last, (Take("kept"), Take("gradient")), time=backward, kind=LAST)
    registers = [Register(name, MANY) for name in ("features", "kept", "gradient")]
    return network.adding([encode, connect, back], registers).reading("F0", Take("features"))


def test_all_of_the_encoder_is_hidden_but_what_the_first_micro_batch_waits_for() -> None:
    before = pipeline()
    alone, run = simulate(before), simulate(encoding(before, 0.25, 0.5))
    assert alone.end == 33
    assert run.end == 33.25
    assert sum(ran.end - ran.start for ran in run.firings if ran.actor in ("encode", "back")) == 6


class Model(nn.Module):
    """A stack of layers behind a connector; the encoder is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.connector = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(STAGES - 1)))

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = self.layers(self.connector(features))
        return out


def loss(model: nn.Module, features: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(features), y)


def made() -> tuple[nn.Module, Model, Tensor, Tensor]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(3, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    images, y = torch.randn(MANY * ROWS, 3), torch.randn(MANY * ROWS, WIDTH)
    return encoder.double(), Model().double(), images.double(), y.double()


def encoded(network: Network, encoder: nn.Module, model: Model, images: Tensor) -> Added:
    """The encoder's actors, and what they do."""
    batches = images.chunk(MANY)

    def encode(firing: Firing) -> Sequence[Any]:
        kept = encoder(batches[firing.label])
        return [kept.detach(), kept]

    def connect(firing: Firing) -> Sequence[Any]:
        (grad,) = firing.held[0][0].value
        (weight,) = model.connector.weight._shards  # type: ignore[attr-defined]
        return [(grad @ weight).detach()]

    def back(firing: Firing) -> Sequence[Any]:
        kept, grad = (slots[0].value for slots in firing.held)
        torch.autograd.backward(kept, grad)
        return []

    return Added(
        encoding(network), {"encode": encode, "connect": connect, "back": back}, feeds={"features": "features"}
    )


def trained() -> tuple[list[float], list[Tensor] | None]:
    """Losses of three steps, and the encoder's weights where they are."""
    encoder, model, images, y = made()
    flow.nn.place(model.connector, flow.placement("cpu", [0]))
    for at, layer in enumerate(model.layers, 1):
        flow.nn.place(layer, flow.placement("cpu", [at]))
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), micro_batches=MANY)
    features = torch.empty(MANY * ROWS, WIDTH, dtype=torch.float64, device="meta")
    step.plan_for(features, y)
    step.add(encoded(step.network, encoder, model, images))
    optimizer = torch.optim.SGD(encoder.parameters(), 0.1)
    losses = []
    for _ in range(3):
        losses.append(step(features, y).full_tensor().item())
        here = all(p.grad is not None for p in encoder.parameters())
        if here:
            optimizer.step()
            optimizer.zero_grad()
    return losses, [p.detach() for p in encoder.parameters()] if here else None


def alone() -> tuple[list[float], list[Tensor]]:
    encoder, model, images, y = made()
    optimizer = torch.optim.SGD([*encoder.parameters(), *model.parameters()], 0.1)
    losses = []
    for _ in range(3):
        value = loss(model, encoder(images), y)
        torch.autograd.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, [p.detach() for p in encoder.parameters()]


def test_the_encoder_trains_as_on_one_device() -> None:
    (losses, weights), (wanted, theirs) = trained(), alone()
    assert losses == pytest.approx(wanted, rel=1e-12)
    assert weights is not None
    torch.testing.assert_close(weights, theirs, rtol=1e-10, atol=1e-12)  # sums over micro-batches


def test_and_so_it_does_on_real_ranks(ranks4: Ranks) -> None:
    """The encoder is on the last rank; its features go to the first, and their gradients come from there."""
    wanted, theirs = alone()
    for rank, (losses, weights) in enumerate(ranks4(trained)):
        assert losses == pytest.approx(wanted, rel=1e-12)
        assert (weights is not None) == (rank == STAGES - 1)
        if weights is not None:
            torch.testing.assert_close(weights, theirs, rtol=1e-10, atol=1e-12)
