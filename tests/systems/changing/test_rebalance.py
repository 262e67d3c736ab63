"""Layers go from a slow stage to the others between two steps, by what stages were seen to take."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow.nn.model.balance import ends_of

STAGES = [flow.placement("cpu", [rank]) for rank in range(2)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8))).double()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.roll(1, 1)).square().mean()  # type: ignore[no-any-return]


def batch(at: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(at)).double()


def cut(speeds: Sequence[float], ends: list[int]) -> list[int]:
    """Where runs are to end for stages of such speeds, by moving one layer at a time as long as the slowest gains."""
    best = ends
    while True:

        def slowest(ends: Sequence[int]) -> float:
            return max(speed * (end - at) for speed, (at, end) in zip(speeds, pairwise([0, *ends]), strict=True))

        tried = [[*best[:n], best[n] + by, *best[n + 1 :]] for n in range(len(best) - 1) for by in (-1, 1)]
        other = min(tried, key=slowest)
        if slowest(other) >= slowest(best):
            return best
        best = other


def place(model: nn.Sequential, ends: Sequence[int]) -> None:
    for stage, (at, end) in zip(STAGES, pairwise([0, *ends]), strict=True):
        for layer in list(model)[at:end]:
            flow.nn.place(layer, stage)


def test_a_slow_stage_is_given_fewer_layers_and_training_goes_on() -> None:
    model, alone = net(), net()
    adam, other = (optim.Adam(each.parameters(), lr=1e-2) for each in (model, alone))
    flow.nn.pipeline(model, STAGES)
    step = flow.compile(model, loss_fn, adam, micro_batches=4)
    for at in range(4):
        if at == 2:
            assert ends_of(list(model)) == [4, 8]
            seconds = [1.0, 3.0]  # as step.rank_times() tells of processes: stage 1 is slow
            place(model, cut([time / 4 for time in seconds], [4, 8]))
            step.move()
        wanted = loss_fn(alone, batch(at))
        wanted.backward()  # type: ignore[no-untyped-call]
        other.step()
        other.zero_grad()
        with flow.record() as moves:
            assert step(batch(at)).item() == pytest.approx(wanted.item(), abs=1e-12)
        moved = sum(move.boxing.total for move in moves if move.op.startswith("moved"))
        layer = sum(value.nbytes for value in alone[0].parameters())
        assert moved == (3 * 2 * layer if at == 2 else 0)  # two layers, and two moments of each number
    assert [layer[0].weight.placement.flat for layer in model] == [(0,)] * 6 + [(1,)] * 2  # type: ignore[index]
