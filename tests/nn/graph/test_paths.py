"""A step goes one of several paths: straight or in micro-batches, on one stage or two, only forward or in training."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import sbpflow as flow
from tests.ranks import Ranks

from .pipes import PAIRS, close, everywhere, mlp, numbers, square_loss, staged, trains

PATHS = list(product([(1, None), (1, "1f1b"), (2, None), (3, "1f1b")], [1, 2], [8, 9]))  # micro-batches and schedule


def model_of(stages: int) -> nn.Module:
    torch.manual_seed(3)
    model = mlp().double()
    return staged(model, PAIRS) if stages == 2 else model


def goes_forward(micro_batches: int, schedule: str | None, stages: int, rows: int) -> None:
    model = model_of(stages)
    one = copy.deepcopy(model)
    where = everywhere()
    asked = flow.compile(
        model, lambda model, x: model(x), placement=where, micro_batches=micro_batches, schedule=schedule
    )
    plain = flow.compile(model, placement=where, micro_batches=micro_batches, schedule=schedule)
    for at in range(2):
        x = numbers(at, rows)[0]
        with torch.no_grad():
            close(asked(x), one(x), 1e-10)
        close(plain(x), one(x), 1e-10)
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("way", "stages", "rows"), PATHS)
def test_every_path_goes_forward(way: tuple[int, str | None], stages: int, rows: int) -> None:
    goes_forward(*way, stages, rows)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "eager_1f1b"])
def test_one_stage_goes_forward_under_any_schedule(schedule: str) -> None:
    goes_forward(2, schedule, 1, 8)


@pytest.mark.parametrize(("way", "stages", "rows"), PATHS)
def test_every_path_trains(way: tuple[int, str | None], stages: int, rows: int) -> None:
    many, schedule = way
    trains(
        model_of(stages),
        batches=lambda at: numbers(at, rows),
        micro_batches=many,
        schedule=schedule,
        placement=everywhere(),
    )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_graph_that_trains_evaluates_on_one_stage(micro_batches: int) -> None:
    model = model_of(1)
    one = copy.deepcopy(model)
    step = trains(model, one=one, micro_batches=micro_batches, placement=everywhere())
    with torch.no_grad():
        close(step(*numbers(9)), square_loss(one, *numbers(9)), 1e-10)


def forward_on_ranks() -> None:
    for micro_batches, stages in product([1, 2, 3], [1, 2]):
        goes_forward(micro_batches, None, stages, 9)


def test_ranks_go_forward_in_micro_batches(ranks4: Ranks) -> None:
    ranks4(forward_on_ranks)
