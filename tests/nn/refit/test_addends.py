"""Models of groups that trained apart come together along an axis: local SGD and DiLoCo, all at once or by parts."""

import copy
from typing import Any

import pytest
import torch
from torch import optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import SbpError
from tests.nn.graph.optimizer.test_on_shards import loss_fn, net
from tests.ranks import Ranks

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
OUTER = {"sgd": {"lr": 1.0}, "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}


def batch(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(at)
    return torch.randn(4, 4).double(), torch.randn(4, 3).double()


def come_together(
    grid: flow.Placement, lies: Any, inner: int, outer: str, parts: list[str], rounds: int = 3
) -> tuple[list[torch.Tensor], int]:
    groups = [grid.at(data=i) for i in range(grid.shape[0])]
    models = [flow.nn.to_global(net(), group, lies) for group in groups]
    optimizers = [optim.SGD(model.parameters(), 0.1) for model in models]
    steps = [
        flow.compile(*each[:1], loss_fn, *each[1:2], placement=each[2])
        for each in zip(models, optimizers, groups, strict=True)
    ]
    anchor = flow.nn.to_global(net(), grid, lambda name, x: {"data": S(0)})
    far = optim.SGD(anchor.parameters(), **OUTER[outer])  # type: ignore[arg-type]
    sent = 0
    for at in range(rounds):
        for i, step in enumerate(steps):
            for k in range(inner):
                step(*batch(10 * at + 2 * k + i))
        for part in parts:
            apart = [model.get_submodule(part) for model in models]
            with flow.record() as moves:
                for x, *each in zip(
                    anchor.get_submodule(part).parameters(), *(one.parameters() for one in apart), strict=True
                ):
                    x.grad = x.detach() - flow.addends(each, grid, "data").to_global(sbp=x.sbp) / len(each)
                far.step()
                far.zero_grad()
                for one in apart:
                    flow.refit(anchor.get_submodule(part), one)
            sent = sum(move.boxing.total for move in moves)
    for model in models:
        for x, y in zip(model.parameters(), anchor.parameters(), strict=True):
            assert torch.equal(x.detach().full_tensor(), y.detach().full_tensor())  # type: ignore[attr-defined]
    return [x.detach().full_tensor() for x in anchor.parameters()], sent  # type: ignore[attr-defined]


def by_hand(inner: int, outer: str, rounds: int = 3) -> list[torch.Tensor]:
    anchor = net()
    far = optim.SGD(anchor.parameters(), **OUTER[outer])  # type: ignore[arg-type]
    for at in range(rounds):
        models = [copy.deepcopy(anchor) for _ in range(2)]
        for i, model in enumerate(models):
            near = optim.SGD(model.parameters(), 0.1)
            for k in range(inner):
                near.zero_grad()
                loss_fn(model, *batch(10 * at + 2 * k + i)).backward()  # type: ignore[no-untyped-call]
                near.step()
        for x, *each in zip(anchor.parameters(), *(model.parameters() for model in models), strict=True):
            x.grad = x.detach() - sum(y.detach() for y in each) / 2
        far.step()
    return [x.detach() for x in anchor.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [[""], ["0", "2"]], ids=["at once", "by parts"])
@pytest.mark.parametrize(("inner", "outer"), [(1, "sgd"), (3, "nesterov")])
@pytest.mark.parametrize("grid", [GRID, flow.placement("cpu:[0-1]", names=("data",))], ids=["of two", "of one"])
def test_groups_come_together_as_by_hand(grid: flow.Placement, inner: int, outer: str, parts: list[str]) -> None:
    found, _ = come_together(grid, B, inner, outer, parts)
    torch.testing.assert_close(found, by_hand(inner, outer))


def test_one_inner_step_is_data_parallel() -> None:
    one = net()
    near = optim.SGD(one.parameters(), 0.1)
    for at in range(3):
        near.zero_grad()
        loss_fn(one, *map(torch.cat, zip(batch(10 * at), batch(10 * at + 1), strict=True))).backward()  # type: ignore[no-untyped-call]
        near.step()
    torch.testing.assert_close(come_together(GRID, B, 1, "sgd", [""])[0], [x.detach() for x in one.parameters()])


def test_an_outer_step_sends_what_an_all_reduce_does() -> None:
    """A reduce_scatter of the weights, and a refit from the pieces."""
    numel = sum(x.numel() for x in net().parameters())
    assert come_together(GRID, B, 1, "nesterov", [""], 1)[1] == 4 * 8 * numel  # 2 (n - 1) / n of it, each of 4 ranks


def on_ranks() -> list[torch.Tensor]:
    return come_together(GRID, {"0.weight": S(0)}, 2, "nesterov", ["0", "2"], 2)[0]


def test_real_ranks_come_together(ranks4: Ranks) -> None:
    for found in ranks4(on_ranks):
        torch.testing.assert_close(found, by_hand(2, "nesterov", 2))


def test_tensors_that_are_no_addends_are_refused() -> None:
    x = flow.ones(4, placement=GRID.at(data=0), sbp=B)
    for parts in ([x], [x, x], [x, torch.ones(4)], [x, flow.ones(4, placement=GRID.at(data=1), sbp=S(0))]):
        with pytest.raises(SbpError, match=r"are one tensor of each of its 2 groups, alike\n(.*\n)+  make each on its"):
            flow.addends(parts, GRID, "data")
