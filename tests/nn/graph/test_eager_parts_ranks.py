"""Eager parts on several processes: all of them run a part, because it may ask for values."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, batch, eager, loss_fn, same, same_model, sgd
from tests.ranks import Ranks


class Picking(nn.Module):
    """Looks at values, in Python and in shapes, and draws."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        mean = y[y > 0].mean()
        if mean > 0.1:
            y = y * 2
        out: Tensor = F.dropout(self.norm(y), self.drop, self.drop > 0) + mean
        return out


def picking(drop: float = 0.2) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Picking(drop), nn.Dropout(0.1), nn.Linear(8, 3)).double()
    flow.nn.eager(model[2])
    return model


def trains(model: Any, rows: int, **how: Any) -> None:
    one = picking(model[2].drop)
    step, ones = flow.compile(model, loss_fn, sgd(model), **how), sgd(one)
    for at in range(3):
        x, y = batch(rows, at)
        torch.manual_seed(at)
        loss = step(x, y)
        torch.manual_seed(at)
        same(loss, eager(one, loss_fn, ones, x, y))
    same_model(model, one)


def in_pieces(rows: int) -> None:
    """The batch in pieces, weights whole."""
    model = picking()
    flow.nn.shard(model, {"*": {"data": B}})
    flow.nn.flow(model[2], input={"data": S(0)}, result={"data": S(0)})
    trains(model, rows, placement=GRID)


def on_two_placements(drop: float) -> None:
    """The part on two ranks of four, which alone run it, and a draw behind it."""
    model = picking(drop)
    flow.nn.place(model[:3], flow.placement("cpu", range(2)))
    flow.nn.place(model[3:], flow.placement("cpu", range(2, 4)))
    trains(model, 8)


def test_a_part_runs_on_processes_as_on_one_device(ranks4: Ranks) -> None:
    ranks4(in_pieces, 8)
    ranks4(in_pieces, 9)
    ranks4(on_two_placements, 0.0)


def refused() -> str:
    with pytest.raises(SbpError) as told:
        on_two_placements(0.2)
    return str(told.value)


def test_a_part_of_some_processes_draws_no_numbers(ranks4: Ranks) -> None:
    assert all("draws random numbers" in told and "pass them to it" in told for told in ranks4(refused))
