"""Steps under tables in which backwards come in another order than forwards, beside one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.actors import Schedule
from sbpflow.placement import Placement
from tests.ranks import Ranks

from ..pipes import ALONE2, PAIRS, line, mlp, numbers, sgd, square_loss, staged, trains, whole

TABLES = {
    "backwards": ("F0 F1 B1 B0", "F0 F1 B1 B0"),
    "one_stage": ("F0 F1 B0 B1", "F0 F1 B1 B0"),
    "forwards": ("F1 F0 B0 B1", "F0 F1 B1 B0"),
    "weights": ("F0 F1 B1 B0 W0 W1", "F0 F1 B1 W1 B0 W0"),
    "mixed": ("F0 F2 F1 F3 B3 B1 B0 B2", "F1 F0 B1 F3 B3 F2 B2 B0"),
    "pairs": ("F0 F1 F2+ B1 B0 B2", "F0 F1 B1 F2+ B0 B2"),
    "chunks": ("F0 F1 f1 b1 f0 B1 b0 B0", "F0 F1 f1 b1 f0 B1 b0 B0"),
}


def table(name: str) -> Schedule:
    return Schedule(name, table=TABLES[name])


def own(name: str, stages: list[Placement], rows: int = 7, **options: Any) -> flow.nn.Graph:
    schedule = table(name)
    model, m = staged(mlp().double(), stages * schedule.v), schedule.shape().m
    return trains(model, schedule=schedule, micro_batches=m, batches=lambda at: numbers(at, rows), **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TABLES)
def test_a_step_is_that_of_one_device(name: str) -> None:
    own(name, ALONE2)


def on_ranks(name: str, pairs: bool) -> None:
    if pairs:
        own(name, PAIRS, rows=8, clip_grad_norm=0.1)
    else:
        own(name, line(0, 3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "pairs"), [("mixed", True), *((name, False) for name in TABLES)])
def test_ranks_train_as_one_device(ranks4: Ranks, name: str, pairs: bool) -> None:
    ranks4(on_ranks, name, pairs)


class Skips(nn.Module):
    """Two layers, of which the second has the input and the first's inside as well, and dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        inside = nn.functional.dropout(torch.tanh(self.first(x)), 0.3)
        y: Tensor = nn.functional.dropout(self.second(inside * x), 0.3) + inside + x
        return y


def skips(name: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Skips().double()
    flow.nn.place(model.first, ALONE2[0])
    flow.nn.place(model.second, ALONE2[1])
    schedule = "1f1b" if name == "1f1b" else table(name)
    step = flow.compile(model, square_loss, sgd(model), micro_batches=4, schedule=schedule)
    torch.manual_seed(1)
    losses = [step(*numbers(at)) for at in range(3)]
    return [whole(x) for x in (*losses, *model.parameters())]


def test_skip_connections_and_random_numbers_go_by_micro_batches() -> None:
    for mine, other in zip(skips("mixed"), skips("1f1b"), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_results_are_in_the_order_of_the_batch() -> None:
    one = mlp().double()
    model = staged(copy.deepcopy(one), ALONE2)
    step = flow.compile(model, both, micro_batches=2, schedule=table("forwards"))
    x, _ = numbers(0)
    torch.testing.assert_close(whole(step(x)[1]), both(one, x)[1])


def both(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    return y.square().mean(), y
