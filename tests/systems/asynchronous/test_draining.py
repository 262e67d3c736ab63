"""Draining: what an empty line between two calls costs a schedule without a flush, as `explain()` tells it."""

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.boxing.graph.measures import Course

from .stages import squares


def course(schedule: str, m: int, p: int = 3) -> Course:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(p)))
        x = torch.zeros(512 * m, 2048)
    flow.nn.pipeline(model, [flow.placement("cuda", [rank]) for rank in range(p)], schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flow.use_cluster("a100x8"):
        step = flow.compile(model, squares, optimizer, micro_batches=m, schedule=schedule).plan_for(x, x)
        found = step.explain().course
        assert found is not None
        return found


@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "pipemare"])
def test_two_calls_take_as_much_longer_than_one_of_twice_the_batch(schedule: str) -> None:
    few, many = course(schedule, 4), course(schedule, 8)
    assert 2 * few.seconds - many.seconds == pytest.approx(few.draining, rel=0.02)
    assert 0.2 < few.draining / few.seconds < 0.4  # (p-1)/(m+p-1) is a third
    assert "; each call fills and drains the line in " in str(few)


def test_a_schedule_with_a_flush_has_none() -> None:
    found = course("1f1b", 4)
    assert found.draining == 0
    assert "drains" not in str(found)
