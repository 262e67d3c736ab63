"""Layers are cut where the longest run of them is as short as can be."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.annotate import placement_of
from sbpflow.nn.balance import balanced
from sbpflow.placement.errors import PlacementError, SbpError


def by_trying(costs: Sequence[float], parts: int) -> list[int]:
    def key(ends: Sequence[int]) -> tuple[float, float, list[int]]:
        runs = [sum(costs[a:b]) for a, b in pairwise([0, *ends])]
        return max(runs), sum(run * run for run in runs), [-end for end in ends]

    every = ([*ends, len(costs)] for ends in combinations(range(1, len(costs)), parts - 1))
    return min(every, key=key)


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        costs = [draw.choice([0.0, 1.0, 1.0, 2.0, 5.0]) for _ in range(draw.randint(1, 8))]
        parts = draw.randint(1, len(costs))
        assert balanced(costs, parts) == by_trying(costs, parts)


def heavy() -> nn.Sequential:
    """One heavy layer and seven light ones."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, n), nn.Linear(n, 64)) for n in [1024, *[128] * 7]))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def test_a_pipeline_is_cut_by_what_its_layers_take() -> None:
    torch.manual_seed(0)
    model, stages = heavy(), [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    flow.nn.pipeline(model, stages)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4)
    x = torch.randn(4096, 64)
    before = step.plan(x).explain()
    costs = step.layer_costs(model)
    assert sum(costs) == pytest.approx(before.compute)
    assert costs[0] > 5 * costs[1]
    flow.nn.pipeline(model, stages, costs=costs)
    after = step.plan(x).explain()
    assert [placement_of(model)[str(n)] for n in range(8)] == [stages[0]] + [stages[1]] * 7
    assert after.course is not None
    assert before.course is not None
    assert after.course.bubble < before.course.bubble
    assert after.predicted is not None
    assert before.predicted is not None
    assert after.predicted < before.predicted
    expected = loss_fn(model, x).item()
    assert step(x).item() == pytest.approx(expected, rel=1e-5)


def test_costs_that_do_not_fit_the_layers_are_refused() -> None:
    model, stages = heavy(), [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    for wrong in ([1.0] * 7, [-1.0] * 8, [float("nan")] * 8):
        with pytest.raises(PlacementError, match="of 8 layers\n  give a number of 0 or more for each layer"):
            flow.nn.pipeline(model, stages, costs=wrong)
    flow.nn.pipeline(model, stages)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=4)
    with pytest.raises(SbpError, match="has no such module: Linear"):
        step.plan(torch.randn(8, 64)).layer_costs([nn.Linear(3, 3)])
