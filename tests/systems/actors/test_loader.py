"""A loader: an actor on a queue of its own brings the arguments of the step, two micro-batches ahead."""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sbpflow.actors import Actor, Added, Give, Network, Register, Take
from sbpflow.actors.protocol.state import Firing
from sbpflow.nn.graph.run.pipeline import Pipelined
from sbpflow.placement.errors import ScheduleError, ShapeError

from .models import MANY, data, layers, piped

QUOTA = 2
Load = Callable[[int], Tensor]


def loading(network: Network, task: str, argument: str, load: Load, ahead: int = QUOTA) -> Added:
    """`load` brings an argument to the task that reads it, on a queue of its own where that runs."""
    name, batch, queue = f"load {argument}", f"batch {argument}", f"host {argument}"
    actor = Actor(name, queue, gives=(Give(batch),), firings=MANY)
    opened = network.adding([actor], [Register(batch, ahead)]).reading(task, Take(batch))

    def work(firing: Firing) -> Sequence[Any]:
        return [load(firing.label)]

    return Added(opened, {name: work}, {queue: network.actor(task).queue}, feeds={batch: argument})


def chunks(x: Tensor) -> Load:
    return lambda k: x.chunk(MANY)[k]


def losses(loaded: bool, **options: Any) -> list[float]:
    step, found, now = piped(layers(), **options), [], list(data())
    step.plan_for(*now)
    if loaded:
        step.add(loading(step.network, "F0", "x", lambda k: chunks(now[0])(k)))
        step.add(loading(step.network, "F3", "y", lambda k: chunks(now[1])(k)))
    for batch in map(data, range(3)):
        now[:] = batch
        given = [torch.empty_like(x, device="meta") for x in batch] if loaded else batch
        found.append(step(*given).full_tensor().item())
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_what_it_brings_is_what_the_step_is_given(schedule: str) -> None:
    assert losses(True, schedule=schedule) == losses(False, schedule=schedule)


def test_it_loads_beside_the_first_stage_and_no_more_than_its_quota_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage is held in each micro-batch until the next is being loaded: else this would not end."""
    step, x, begun, ahead = piped(layers()), data(), [threading.Event() for _ in range(MANY + 1)], []
    begun[MANY].set()
    work, done = Pipelined.work, 0

    def held(self: Pipelined, actor: Actor) -> Any:
        run = work(self, actor)

        def fire(firing: Firing) -> Sequence[Any]:
            nonlocal done
            assert begun[firing.label + 1].wait(20)
            out = run(firing)
            done += 1
            return out

        return fire if actor.name == "F0" else run

    def load(k: int) -> Tensor:
        begun[k].set()
        ahead.append(k - done)
        return chunks(x[0])(k)

    monkeypatch.setattr(Pipelined, "work", held)
    step.plan_for(*x).add(loading(step.network, "F0", "x", load))
    step(torch.empty_like(x[0], device="meta"), x[1])
    assert max(ahead) < QUOTA
    assert [str(ran) for ran in step.planned.program.outcome.of("host x")] == [f"load x{k}" for k in range(MANY)]


def test_an_argument_is_brought_or_given() -> None:
    step, (x, y) = piped(layers()), data()
    step.plan_for(x, y).add(loading(step.network, "F0", "x", chunks(x)))
    with pytest.raises(ScheduleError, match="x is brought by the register batch x, and was given too"):
        step(x, y)
    assert step(torch.empty_like(x, device="meta"), y).item() == losses_of(x, y)


def losses_of(x: Tensor, y: Tensor) -> float:
    value: float = piped(layers())(x, y).item()
    return value


@pytest.mark.parametrize(
    ("task", "argument", "said"),
    [("F1", "x", "F0 reads x and does not take batch x"), ("F0", "z", "there is no argument z\n  there are x, y")],
)
def test_who_reads_an_argument_has_to_take_it(task: str, argument: str, said: str) -> None:
    step, (x, y) = piped(layers()), data()
    step.plan_for(x, y)
    with pytest.raises(ScheduleError, match=said):
        step.add(loading(step.network, task, argument, chunks(x)))


@pytest.mark.parametrize("schedule", ["gems", "chimera", "dualpipe"])
def test_tasks_of_two_routes_would_take_what_the_other_route_takes(schedule: str) -> None:
    """Each counts its own micro-batches, and the first slots would be those of both."""
    step, (x, y) = piped(layers(), schedule=schedule), data()
    step.plan_for(x, y)
    task = next(actor.name for actor in step.network.actors if "F3" in (actor.name, *actor.parts))
    with pytest.raises(ScheduleError, match=f"batch y brings y, and under {schedule} .* two routes(.|\n)*'1f1b'"):
        step.add(loading(step.network, task, "y", chunks(y)))


@pytest.mark.parametrize("wrong", [torch.zeros(3, 6), torch.zeros(2, 6, dtype=torch.float64), None], ids=str)
def test_a_micro_batch_of_another_kind_is_refused(wrong: Tensor) -> None:
    step, (x, y) = piped(layers()), data()
    step.plan_for(x, y).add(loading(step.network, "F0", "x", lambda k: wrong))
    with pytest.raises(ShapeError, match=r"micro-batch 0 of x is .*\n  the step was planned for \(2, 6\)"):
        step(torch.empty_like(x, device="meta"), y)


def test_a_loader_that_ends_early_is_refused() -> None:
    step, (x, y) = piped(layers()), data()
    network = step.plan_for(x, y).network
    short = Actor("load", "host", gives=(Give("batch"),), firings=MANY - 1)
    opened = network.adding([short], [Register("batch")]).reading("F3", Take("batch"))
    with pytest.raises(ScheduleError, match="F3 fires 7 times, and in the step 8 times"):
        step.add(Added(opened, {"load": lambda firing: [None]}, {"host": 0}))


def test_a_step_with_a_loader_that_nobody_has_leaves_no_thread() -> None:
    gc.collect()  # steps of other tests
    before = threading.active_count()
    step, (x, y) = piped(layers()), data()
    step.plan_for(x, y).add(loading(step.network, "F0", "x", chunks(x)))
    step(torch.empty_like(x, device="meta"), y)
    assert threading.active_count() > before
    del step
    gc.collect()
    assert threading.active_count() == before
