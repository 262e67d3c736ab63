"""Meetings of processes of which one ends: the others are told so, and nobody waits for it."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from sbpflow.placement.errors import SbpflowError
from tests.ranks import Fresh


def one_dies(victim: int, folder: Path, what: str) -> str:
    """A save or load that a rank does not live to come to; the limit of waiting is beyond that of the test."""
    flow.init(timeout=60)
    model = torch.nn.Linear(3, 3)
    model.requires_grad_(False).weight.fill_(1).add_(model.bias.fill_(1))
    flow.save(folder / "step-1", model, step=1)
    if torch.distributed.get_rank() == victim:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if what == "save":
            flow.save(folder / "step-2", model, step=2, asynchronous=victim == 2).wait()
        else:
            flow.load(folder / "step-1", model)
    except SbpflowError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("victim", "what"), [(0, "save"), (2, "save"), (0, "load")])
def test_a_rank_that_is_gone_is_named_and_nobody_waits(fresh: Fresh, tmp_path: Path, victim: int, what: str) -> None:
    ended = fresh(4, one_dies, victim, tmp_path, what)
    assert [each.code for each in ended] == [-signal.SIGKILL if rank == victim else 0 for rank in range(4)]
    said = [each.answer.value for each in ended if each.answer is not None]
    assert len(said) == 3
    for text in said:
        assert text.startswith(f"TransportError: flow.{what}: ")
        assert all(words in text for words in (f"rank {victim}", "has ended", "start all processes anew")), text
    assert flow.newest(tmp_path).path.name == "step-1"  # type: ignore[union-attr]
