"""Several additions to one step: memory is levelled, a loader brings the batch, and another job fills the bubbles."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import bpipe
from sbpflow.actors.protocol.state import Firing
from sbpflow.placement.errors import ScheduleError
from tests.ranks import Ranks

from .models import MANY, data, layers, piped
from .test_loader import chunks, loading
from .test_pipefill import filling


def losses(opened: bool) -> tuple[list[float], set[tuple[int, int]]]:
    step, (x, y), done = piped(layers()), data(), set[tuple[int, int]]()
    step.plan_for(x, y)
    if opened:
        step.add(bpipe)
        step.add(loading(step.network, "F0", "x", chunks(x)))  # each on the rank that reads it
        step.add(loading(step.network, "F3", "y", chunks(y)))
        step.add(filling(step.network, lambda device, number: done.add((device, number))))
    given = [torch.empty_like(part, device="meta") if opened else part for part in (x, y)]
    found = [step(*given).full_tensor().item() for _ in range(3)]
    made = step.timeline()
    assert made is None or not opened or "fill" in str(sorted(ran.actor for of in made.ranks.values() for ran in of))
    return found, done


def test_additions_do_not_know_of_each_other() -> None:
    (opened, done), (plain, _) = losses(True), losses(False)
    assert opened == plain
    assert done == {(device, number) for device in range(4) for number in range(3)}


def test_nor_on_real_ranks(ranks4: Ranks) -> None:
    plain, _ = losses(False)
    for rank, (opened, done) in enumerate(ranks4(losses, True)):
        assert opened == plain
        assert done == {(rank, number) for number in range(3)}


def test_an_inference_is_opened_too() -> None:
    """It has forwards alone; added work sees what these hand on, without gradients as whoever called it."""
    seen: list[tuple[int, tuple[int, ...], bool]] = []

    def see(firing: Firing) -> Sequence[Any]:
        ((value,),) = (slots[0].value for slots in firing.held)
        seen.append((firing.label, tuple(value.shape), torch.is_grad_enabled()))
        return [(value,)]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    model, (x, _) = layers(2), data()
    flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(2)])
    step = flow.compile(model, forward, micro_batches=4)
    with torch.no_grad():
        wanted = step(x).full_tensor()
        again = flow.compile(model, forward, micro_batches=4)
        network = again.plan_for(x).network.through("x.1", flow.actors.Actor("see", "beside"))
        again.add(flow.actors.Added(network, {"see": see}, {"beside": "device 0"}))
        assert torch.equal(again(x).full_tensor(), wanted)
    assert seen == [(k, (4, 6), False) for k in range(4)]


def test_an_addition_that_is_no_function_is_of_one_network() -> None:
    """Added to a step with another order, it replaced that: a move to gpipe went on in 1F1B, and nothing was said."""
    x, y = data()
    for schedule, fine in (("1f1b", True), ("gpipe", False)):
        step = piped(layers()).plan_for(x, y)
        step.add(filling(step.network, lambda *_: None))
        step(x, y)
        step.move(schedule=schedule)
        if fine:
            step(x, y)
            continue
        with pytest.raises(ScheduleError, match="made of the network of another step"):
            step(x, y)
    step = piped(layers()).plan_for(x, y).add(lambda network: filling(network, lambda *_: None))
    step(x, y)
    step.move(schedule="gpipe")
    step(x, y)
    ran = [each.actor for each in step.planned.program.proved.proof.of("device 3") if "3" in each.actor[:2]]
    assert ran == ["F3"] * MANY + ["B3"] * MANY
