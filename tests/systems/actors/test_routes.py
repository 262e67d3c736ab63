"""Registers of a step that are led through added actors: under every schedule, and between groups of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors import Actor, Added, handed_on
from sbpflow.actors.schedules.published import PUBLISHED
from tests.ranks import Ranks

from .models import data, layers, piped, square

LED = ("act.0", "stash.0", "act.1", "stash.1", "x.2")
CUT = [name for name, schedule in PUBLISHED.items() if schedule.slices]
WHOLE = [name for name in PUBLISHED if name not in (*CUT, "2bw")]  # 2bw has as many micro-batches an update as it likes


def led(step: Any, names: tuple[str, ...], ranks: str = "device 0") -> None:
    """These registers of the step, each through an actor that hands on what it finds."""
    network = step.network
    here = [name for name in names if any(register.name == name for register in network.registers)]
    assert here
    for name in here:
        network = network.through(name, Actor(f"stop {name}", f"way of {name}"))
    work = {f"stop {name}": handed_on for name in here}
    step.add(Added(network, work, {f"way of {name}": ranks for name in here}))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", WHOLE)
def test_every_schedule_does_what_it_did(schedule: str) -> None:
    way = PUBLISHED[schedule]
    rows = 18 if way.synchronous else 16  # the last micro-batches are smaller
    many = 4 if way.v == 1 and way.way != "vee" else 8

    def losses(through: bool) -> list[float]:
        model = layers(many)
        flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(4)], schedule)
        step = flow.compile(model, square, torch.optim.SGD(model.parameters(), 0.1), micro_batches=8, schedule=schedule)
        batch = data(rows=rows)
        step.plan_for(*batch)
        if through:
            led(step, LED)
        return [step(*batch).item() for _ in range(2)]

    assert losses(True) == losses(False)


def test_a_register_between_stages_goes_by_way_of_a_third() -> None:
    step, plain, batch = piped(layers()), piped(layers()), data()
    step.plan_for(*batch)
    led(step, ("x.1", "dy.1"), "device 3")
    assert [step(*batch).item() for _ in range(2)] == [plain(*batch).item() for _ in range(2)]


GRID = flow.placement("cpu:[0-3] as (pipe=2, data=2)")


def grouped(through: bool) -> tuple[list[float], list[Tensor]]:
    """Two stages of two ranks: what the first keeps lies on the second meanwhile, and comes back to the same rank."""
    model = layers(4)
    flow.nn.pipeline(model, [GRID.at(pipe=0), GRID.at(pipe=1)])
    flow.nn.shard(model, {"*": {"data": B}}, "weights")
    inputs = {"x": {"data": S(0)}, "y": {"data": S(0)}}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = flow.compile(model, square, optimizer, micro_batches=4, inputs=inputs)
    batch = data(rows=16)
    step.plan_for(*batch)
    if through:
        network = step.network.through("act.0", Actor("out", "out"), Actor("back", "back"), slots=(2, 2, 1))
        step.add(Added(network, {"out": handed_on, "back": handed_on}, {"out": "device 0", "back": "device 1"}))
    losses = [step(*batch).full_tensor().item() for _ in range(2)]
    return losses, [value.full_tensor().detach() for value in model.state_dict().values()]


def same(a: tuple[list[float], list[Tensor]], b: tuple[list[float], list[Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(p, q) for p, q in zip(a[1], b[1], strict=True))


def test_stages_of_several_ranks_keep_for_each_other() -> None:
    assert same(grouped(True), grouped(False))


def test_and_so_do_real_ranks(ranks4: Ranks) -> None:
    for mine, plain in zip(ranks4(grouped, True), ranks4(grouped, False), strict=True):
        assert same(mine, plain)
