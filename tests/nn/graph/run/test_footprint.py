"""The footprint of a pipelined step is at or above what its ranks are seen to take."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.world import world
from tests.ranks import Ranks

from ..memory.test_liveness import Live
from ..pipes import ALONE4, PAIRS, mlp, numbers, sgd, square_loss, staged


def peaks(
    schedule: str, pieces: int, width: int, rows: int, pairs: bool = False, split: bool = False
) -> tuple[int, int]:
    """Bytes that a step was seen to take here beside what the optimizer keeps, and those that `explain` tells."""
    torch.manual_seed(0)
    model: nn.Module = staged(mlp(4, width).double(), PAIRS if pairs else ALONE4, schedule)
    if pairs:
        flow.nn.shard(model, {"*.weight": S(0), "*.bias": B} if split else {"*": B})
    step: Any = flow.compile(model, square_loss, sgd(model), schedule=schedule, micro_batches=pieces)
    batch = numbers(0, rows=rows, width=width)
    for _ in range(2):
        step(*batch)
    rank = world().rank
    assert rank is not None
    live = Live()
    held = [x for of in step.planned.model.held.values() for x in of._shards]
    live.known.update(x.untyped_storage()._cdata for x in held)
    with live:
        step(*batch)
    return live.peak + sum(x.nbytes for x in held), step.planned.memory()[rank].total


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pieces", [4, 8])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_the_footprint_of_a_real_rank_is_not_told_too_small(ranks4: Ranks, schedule: str, pieces: int) -> None:
    """How many bytes are alive at once depends on which rank is quicker: what is told holds for the worst case."""
    for seen, told in ranks4(peaks, schedule, pieces, 64, 64):
        assert seen <= told <= 2 * seen


def test_nor_is_that_of_corrected_weights(ranks4: Ranks) -> None:
    """A backward reads a copy of its stage's weights."""
    for seen, told in ranks4(peaks, "pipemare_corrected", 4, 64, 16):
        assert seen <= told <= 2 * seen


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_nor_is_that_of_stages_whose_gradients_come_home_in_buckets(ranks4: Ranks, schedule: str) -> None:
    for seen, told in ranks4(peaks, schedule, 4, 64, 256, True):
        assert seen <= told <= 2 * seen


def test_nor_is_that_of_two_tasks_at_once(ranks4: Ranks) -> None:
    for seen, told in ranks4(peaks, "dualpipe_v", 4, 64, 256, True, True):
        assert seen <= told <= 2 * seen
