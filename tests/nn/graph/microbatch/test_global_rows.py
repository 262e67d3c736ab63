"""Micro-batches of a batch that is global: in stages too, and without a move where ranks hold rows of each."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from sbpflow.boxing import box
from sbpflow.nn.graph.microbatch.global_rows import held_rows, in_runs
from sbpflow.nn.tensors.tensor import wrap
from sbpflow.sbp import Layout
from sbpflow.sbp.state import State

GRID = flow.placement("cpu:[0-3] as (pipe=2, data=2)")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    return nn.functional.cross_entropy(model(x), y)


def in_turns(x: Tensor, many: int) -> flow.GlobalTensor:
    """A tensor of which each half of the grid's ranks has its share of each of so many runs of rows."""
    whole = flow.tensor(x, placement=GRID, sbp=B)
    there = Layout(GRID, State(((-many, 1), *[()] * (x.ndim - 1))), tuple(x.shape), x.dtype)
    return wrap(tuple(shard.contiguous() for shard in box(whole._shards, whole._layout, there)), there)


@pytest.mark.parametrize("how", ["turns", "rows of all", "rows of stages"])
def test_stages_take_a_batch_that_lies_on_the_whole_grid(how: str) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    wanted = loss_fn(net, *batch).item()
    flow.nn.place(net[:1], GRID[0])
    flow.nn.place(net[1:], GRID[1])
    flows: Any = {"x": {"data": S(0)}, "y": {"data": S(0)}}
    step = flow.compile(net, loss_fn, torch.optim.SGD(net.parameters()), micro_batches=4, inputs=flows)
    rows: Any = (S(0), S(0)) if how == "rows of all" else (B, S(0))
    given = [in_turns(x, 4) if how == "turns" else flow.tensor(x, placement=GRID, sbp=rows) for x in batch]
    with flow.record() as moves:
        assert step(*given).item() == pytest.approx(wanted, abs=1e-6)
    inputs = [move.bytes for move in moves if move.op == "input"]
    assert (sum(inputs) == 0) == (how == "turns")


@pytest.mark.parametrize("many", [1, 2, 4])
def test_a_run_of_rows_is_a_part_of_each_shard(many: int) -> None:
    x = torch.arange(24.0).reshape(12, 2)
    y = in_turns(x, many)
    if many == 1:
        assert in_runs(flow.tensor(x, placement=GRID, sbp=(B, S(0))), 12) is None
        return
    run = in_runs(y, 12 // many)
    assert run is not None
    assert in_runs(y, 5) is None
    for k in range(many):
        assert torch.equal(held_rows(y, run, k * 12 // many).full_tensor(), x.chunk(many)[k])
