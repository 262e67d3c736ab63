"""The ends of chunks in several processes, of two ranks a stage: on the devices' queues, in the order of the proof."""

from typing import Any

from sbpflow import S
from sbpflow.actors import Folding
from sbpflow.placement.world import world
from tests.ranks import Ranks

from .stages import Trained, same, trained

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


def test_several_processes_train_as_one(ranks4: Ranks) -> None:
    alone = [trained("bfpp", ranks=2, **how) for how in WAYS.values()]
    for each in ranks4(everywhere):
        for mine, one in zip(each, alone, strict=True):
            one.states = {}
            same(mine, one)
