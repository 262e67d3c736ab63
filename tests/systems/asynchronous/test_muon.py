"""Muon: an update of a matrix takes all of it; each is computed once, by the rank that owns it."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.ranks import Ranks

from .stages import numbers, squares, whole

STEPPED = Counter[tuple[int, ...]]()
SHAPES = [(8, 8), (24, 8), (24, 24), (8, 24)]


@flow.nn.steps_by_tensor
class Counted(torch.optim.Muon):
    """It counts the matrices that this process steps."""

    def step(self, closure: Any = None) -> Any:
        STEPPED.update(tuple(p.shape) for group in self.param_groups for p in group["params"])
        return super().step(closure)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(b, a, bias=False) for a, b in SHAPES)).double()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


PLANS = {
    "data parallel": "grid (data=4)\ninput * <- data=S(0)",
    "ZeRO-1": "grid (data=4)\ninput * <- data=S(0)\nstates **: data=S(0)",
    "ZeRO-3": "grid (data=4)\ninput * <- data=S(0)\n**: data=S(0)",
}


def stepped(plan: str) -> tuple[list[Tensor], Counter[tuple[int, ...]]]:
    STEPPED.clear()
    model = Net()
    step = flow.compile(model, squares, Counted(model.parameters(), lr=0.02), plan=plan)
    for at in range(2):
        step(*numbers(16, at))
    return [x.detach() for x in whole(model)], Counter(STEPPED)


def alone() -> list[Tensor]:
    model = Net()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for at in range(2):
        optimizer.zero_grad()
        squares(model, *numbers(16, at)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()  # type: ignore[no-untyped-call]
    return [x.detach() for x in model.parameters()]


def test_each_matrix_is_stepped_by_one_owner(ranks4: Ranks) -> None:
    found = ranks4(stepped, PLANS["ZeRO-1"])
    total: Counter[tuple[int, ...]] = sum((count for _, count in found), Counter())
    assert total == dict.fromkeys(SHAPES, 2)  # two steps
    assert max(len(count) for _, count in found) == 1  # four matrices, four owners
    for values, _ in found:
        torch.testing.assert_close(values, alone(), rtol=0, atol=1e-3)  # products in bfloat16, of other sums


@pytest.mark.parametrize(("lies", "times"), [("data parallel", 3.0), ("ZeRO-3", 3 * 3 / 4)])
def test_bytes_of_a_step(lies: str, times: float) -> None:
    """Of whole weights an owner sends the new one to three others. Of pieces it gets those of the gradient and of the
    weight that it lacks, and sends as many back."""
    model = Net()
    step = flow.compile(model, squares, Counted(model.parameters(), lr=0.02), plan=PLANS[lies])
    step(*numbers(16, 0))
    with flow.record() as moves:
        step(*numbers(16, 1))
    size = 8 * sum(a * b for a, b in SHAPES)
    assert sum(move.boxing.total for move in moves if move.op == "optimizer whole") == times * size
    assert {s.owner for s in step.physical.sources if s.kind == "parameter"} == {0, 1, 2, 3}
