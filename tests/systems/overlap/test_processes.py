"""The ends of chunks in several processes, of two ranks a stage: exchanges of links are in a lane of their own."""

from threading import Event
from typing import Any

import torch

from sbpflow import S
from sbpflow.actors import Folding
from sbpflow.actors.protocol.state import Firing
from sbpflow.nn.graph.run.bound_tasks import BoundTask
from sbpflow.nn.graph.run.weights.chunk_weights import ChunkWeights
from sbpflow.nn.graph.tasks.task import Name
from sbpflow.placement.world import world
from tests.ranks import Ranks

from .stages import Trained, plan_of, same, trained

WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "parts": {"overlap": Folding(once=True, parts=2), "rest": S(0)},
    "clipped": {"post_validation": True, "clip_grad_norm": 0.35, "skip_nonfinite": True, "spoilt": (1,)},
}


def everywhere() -> list[Trained]:
    return [told(trained("bfpp", ranks=2, **how)) for how in WAYS.values()]


def told(made: Trained) -> Trained:
    timeline = made.step.timeline()
    assert (timeline is None) == (world().rank != 0)
    if timeline is not None:
        assert any(ran.actor.startswith("R") for records in timeline.ranks.values() for ran in records)
    made.step = made.moves = None  # do not travel
    return made


def beside(steps: int) -> list[str]:
    """The last backward of a rank's first chunk waits here until the gradients of its second are home."""
    made = trained("bfpp", ranks=2, overlap=True, steps=1)
    program, home, waited = plan_of(made), Event(), list[bool]()
    begun, weights = program.bound.begun, program.proved.weights
    assert isinstance(weights, ChunkWeights)
    mine = 0 if world().rank in (0, 1) else 1
    each = weights.work_of[weights.keys[0]].homes[mine + 2]
    run = each.run

    def going(*given: Any) -> Any:
        found = run(*given)
        home.set()
        return found

    def begins(entry: BoundTask, k: int, firing: Firing) -> Any:
        if (entry.name, k) == (Name("B", mine), len(program.proved.kinds) - 1):
            waited.append(home.wait(20))
        return begun(entry, k, firing)

    each.run = going  # type: ignore[method-assign, assignment]
    program.bound.begun = begins  # type: ignore[method-assign]
    for _ in range(steps):
        home.clear()
        made.step(torch.zeros(16, 8), torch.ones(16, 8))
    assert waited == [True] * steps
    return list(program.proved.network.queues)


def test_links_exchange_while_devices_compute(ranks4: Ranks) -> None:
    for queues in ranks4(beside, 20):
        assert {"link 0", "link 1"} <= set(queues)


def test_several_processes_train_as_one(ranks4: Ranks) -> None:
    alone = [trained("bfpp", ranks=2, **how) for how in WAYS.values()]
    for each in ranks4(everywhere):
        for mine, one in zip(each, alone, strict=True):
            one.states = {}
            same(mine, one)
