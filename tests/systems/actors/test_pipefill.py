"""PipeFill: another job runs in the bubbles of a pipeline, and the pipeline does what it did."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbpflow.actors import Actor, Added, Network, simulate
from sbpflow.actors.protocol.state import Firing

from .models import data, layers, piped

EACH = 3  # batches on every device
LAST = 9  # a kind: whatever else a device has to do goes first


def filling(network: Network, work: Callable[[int, int], object], each: int = EACH, time: float = 1.0) -> Added:
    """So many calls of `work` on each device, of its number and that of the call."""
    actors = [Actor(f"fill {q[7:]}", q, firings=each, time=time, kind=LAST) for q in network.queues if "device" in q]

    def calling(device: int) -> Callable[[Firing], Sequence[Any]]:
        def fill(firing: Firing) -> Sequence[Any]:
            work(device, firing.label)
            return []

        return fill

    return Added(network.adding(actors), {a.name: calling(int(a.name[5:])) for a in actors})


def evaluated(filled: bool) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Losses of two steps, and those of another model on the batches of the job, by device and number."""
    torch.manual_seed(7)
    other, batches = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), torch.randn(4, EACH, 5, 6)
    step, found = piped(layers()), dict[tuple[int, int], float]()

    @torch.no_grad()
    def evaluate(device: int, number: int) -> None:
        x: Tensor = batches[device, number]
        found[device, number] = nn.functional.mse_loss(other(x), x).item()

    x, y = data()
    step.plan_for(x, y)
    if filled:
        step.add(filling(step.network, evaluate))
    losses = [step(x, y).full_tensor().item() for _ in range(2)]
    if not filled:
        for device in range(4):
            for number in range(EACH):
                evaluate(device, number)
    return losses, found


def test_the_job_is_done_and_the_step_is_what_it_was() -> None:
    assert evaluated(True) == evaluated(False)


@pytest.mark.parametrize("time", [1.0, 0.5])
def test_a_job_that_fits_the_bubbles_costs_nothing(time: float) -> None:
    """A bubble of this 1F1B is of whole units: 9 of 33 on every device."""
    step = piped(layers())
    network = step.plan_for(*data()).network
    alone = simulate(network)
    run = simulate(filling(network, lambda *_: None, each=int(9 / time), time=time).network)
    assert run.end == alone.end == 33
    assert all(run.busy(queue) == 33 for queue in network.queues)  # no bubble is left


def test_a_call_that_has_begun_is_not_stopped() -> None:
    """One that takes longer than a bubble puts off what comes behind it: the step is told to be longer."""
    step = piped(layers())
    network = step.plan_for(*data()).network
    run = simulate(filling(network, lambda *_: None, each=3, time=2.5).network)
    assert 33 < run.end <= 33 + 4 * 2.5
