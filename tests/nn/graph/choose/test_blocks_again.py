"""Blocks that the backward runs again for a limit of memory: as few as it takes, and values are the same."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.graph.choose.blocks_again import Worth, cheapest
from sbpflow.placement import Placement
from sbpflow.placement.errors import SbpError, ShortageError
from tests.nn.graph.memory.test_liveness import Live
from tests.nn.graph.memory.test_recomputation import Mlp, loss_fn

ONE, PAIR = flow.placement("cpu", range(1)), flow.placement("cpu", range(2))


def deep(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp(16) for _ in range(layers)))


def values() -> torch.Tensor:
    return torch.randn(64, 32, 16, generator=torch.Generator().manual_seed(1))


def planned(model: nn.Module, limit: float | None, where: Placement = ONE, **more: Any) -> Any:
    return flow.compile(model, loss_fn, placement=where, memory=limit, **more).plan_for(values())


def total(step: Any) -> int:
    return int(max(held.total for held in step.explain().memory.ranks.values()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("share", "many"), [(1.0, 0), (0.8, 2), (0.4, 6)])
def test_as_few_as_it_takes(share: float, many: int) -> None:
    limit = share * total(planned(deep(), None))
    step = planned(deep(), limit)
    assert total(step) <= limit
    assert list(step.explain().memory.again) == [str(at) for at in range(many)]
    assert step.explain().dict()["memory"]["again"] == [str(at) for at in range(many)]
    assert (f"to fit, {many} blocks are run again in the backward: 0, 1" in str(step.explain())) == bool(many)
    if many:
        fewer = deep()
        flow.nn.recompute(list(fewer)[: many - 1])
        assert total(planned(fewer, None)) > limit


@pytest.mark.sweep
@pytest.mark.parametrize("where", [ONE, PAIR], ids=["alone", "pair"])
def test_what_is_learnt_is_the_same_and_the_limit_holds(where: Placement) -> None:
    plain, model = deep(), deep()
    limit = 0.5 * total(planned(copy.deepcopy(model), None, where))
    step = planned(model, limit, where)
    assert step.explain().memory.again
    loss = step(values())
    wanted = loss_fn(plain, values())
    torch.autograd.backward(wanted)
    torch.testing.assert_close(loss.full_tensor(), wanted)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
    model.zero_grad()
    with Live() as live:
        step(values())
    assert live.peak <= limit * where.size


def test_nothing_is_run_again_where_something_else_fits() -> None:
    """Cut over two ranks it takes half."""
    limit = 0.6 * total(planned(deep(4), None))
    assert planned(deep(4), limit).explain().memory.again
    assert not planned(deep(4), limit, PAIR).explain().memory.again


def test_a_limit_that_nothing_meets_says_that_all_are_run_again() -> None:
    with pytest.raises(ShortageError, match=r"(?s)no plan fits into 100 KiB.*all 8 blocks of layers are run again"):
        planned(deep(), 100 * 1024)


def test_an_inference_keeps_nothing_that_could_be_let_go() -> None:
    model = deep()
    with torch.no_grad(), pytest.raises(SbpError, match="no plan fits") as refused:
        flow.compile(model, placement=ONE, memory=1e4).plan_for(values())
    assert "run again" not in str(refused.value)


def test_a_pipeline_meets_its_limit_so() -> None:
    def need(limit: float | None) -> Any:
        model = deep()
        flow.nn.pipeline(model, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
        return flow.compile(model, loss_fn, micro_batches=2, memory=limit).plan_for(values())

    limit = 0.6 * total(need(None))
    step = need(limit)
    assert total(step) <= limit
    assert step.explain().memory.again


class Bent(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_that_are_unlike_are_run_again_too() -> None:
    limit = 0.85 * total(planned(Bent((64, 96, 80)), None))
    step = planned(Bent((64, 96, 80)), limit)
    assert total(step) <= limit
    assert {*step.explain().memory.again} <= {"layers.0", "layers.1", "layers.2"}
    assert step.explain().memory.again


def test_more_blocks_are_run_again_where_that_is_cheaper() -> None:
    """Of a number of blocks each has a price; what cannot be below the best is not tried, nor what has no room."""
    prices, tried = {0: 9.0, 1: 8.0, 2: 7.0, 4: 8.5}, list[int]()

    def attempt(blocks: Sequence[str]) -> int:
        tried.append(len(blocks))
        if len(blocks) not in prices:
            raise ShortageError("none fits")
        return len(blocks)

    worth = [Worth(str(n), 1.0) for n in range(8)]
    assert cheapest(0, 5.0, worth, attempt, prices.__getitem__) == 2
    assert tried == [1, 2]  # with two 5 + 2 seconds is all that there could be
    assert cheapest(None, 0.0, worth[:2], attempt, prices.__getitem__) == 2
    assert cheapest(0, 8.5, worth, attempt, prices.__getitem__) == 0
