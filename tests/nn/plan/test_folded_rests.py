"""Rests of a plan in which experts see all of an axis, or a part of it, under another name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

F64 = torch.float64


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 24, dtype=F64) / 4)
        self.down = nn.Parameter(torch.randn(count, 24, 8, dtype=F64) / 4)

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor) -> Tensor:
        made: Tensor = flow.nn.experts(x, chosen, share, self.up, self.down, act="relu")
        return made


class Mixture(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.gate = (nn.Linear(8, width, dtype=F64) for width in (8, count))
        self.experts = Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        share, chosen = self.gate(x).softmax(-1).topk(2)
        made: Tensor = x + self.experts(x, chosen, share)
        return made


def squares(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def model_of(count: int = 8) -> Mixture:
    torch.manual_seed(0)
    return Mixture(count)


RESTS = {
    "states": "experts.*: expert=S(0)\nstates **: data=S(0)",
    "states and gradients": "states **: data=S(0)\ngrads **: data=S(0)\nexperts.*: expert=S(0)",
    "all": "**: data=S(0)\nexperts.*: expert=S(0)",
    "tokens sent": "experts.*: expert=S(0)\ninside experts use dropless over expert\nstates **: data=S(0)",
}


@pytest.mark.parametrize("rests", RESTS.values(), ids=RESTS)
@pytest.mark.parametrize(("expert", "count"), [(4, 8), (2, 8), (4, 6)], ids=["all", "half", "uneven"])
def test_zero_of_all_but_experts_trains_as_one_device(rests: str, expert: int, count: int) -> None:
    model, x = model_of(count), torch.randn(16, 8, dtype=F64)
    alone = copy.deepcopy(model)
    plan = f"grid cpu (data=4, expert={expert} folds data)\ninput x <- data=S(0)\n{rests}"
    step: Any = flow.compile(model, squares, torch.optim.AdamW(model.parameters(), 0.01), plan=plan)
    other = torch.optim.AdamW(alone.parameters(), 0.01)
    for _ in range(3):
        other.zero_grad()
        want = squares(alone, x)
        want.backward()  # type: ignore[no-untyped-call]
        other.step()
        torch.testing.assert_close(step(x).full_tensor(), want.detach(), rtol=1e-12, atol=1e-12)
    pairs: list[tuple[Any, Any]] = list(zip(model.parameters(), alone.parameters(), strict=True))
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.full_tensor(), theirs.detach())


@pytest.mark.parametrize("expert", [4, 2], ids=["all", "half"])
def test_states_of_experts_lie_over_what_is_left_of_the_axis(expert: int) -> None:
    model = model_of()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    plan = f"grid cpu (data=4, expert={expert} folds data)\nexperts.*: expert=S(0)\nstates **: data=S(0)"
    step: Any = flow.compile(model, squares, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), plan=plan)
    step(torch.randn(16, 8, dtype=F64))
    assert {rank.states for rank in step.memory_at_rest().values()} == {nbytes // 4}


@pytest.mark.parametrize("line", ["states experts.*: data=S(0)", "experts.up: data=B", "grads experts.down: data=S(1)"])
def test_a_line_for_experts_alone_has_to_name_the_fold(line: str) -> None:
    plan = flow.Plan.read(f"grid cpu (data=4, expert=4 folds data)\nexperts.*: expert=S(0)\n{line}")
    said = r"(?s)line 3: experts\.\w+ is on the ranks of data as expert.*write expert="
    with pytest.raises(flow.SbpError, match=said):
        plan.check(model_of(), torch.zeros(16, 8, dtype=F64), loss_fn=squares)
