"""Recurrent cells in a graph: torch takes them apart into ops that write in place, and the graph has none of these."""

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp import Sbp
from tests.nn.graph.alike import F64, LINE, WHERE, batch, trains_alike

CELLS = pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])


class Unrolled(nn.Module):
    """A cell that reads two numbers of a row, one by one."""

    def __init__(self, cell: type[nn.Module], width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.cell, self.head = cell(1, width).to(F64), nn.Linear(width, 3).to(F64)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for column in torch.split(x[:, :2], 1, 1):
            state = self.cell(column, state)
        assert state is not None
        out: Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return out


@pytest.mark.sampled(2)
@CELLS
@WHERE
def test_cells_write_to_no_leaf(cell: type[nn.Module], where: flow.Placement) -> None:
    step = trains_alike(Unrolled(cell), where)
    assert not any(op.op._schema.is_mutable for op in step.planned.plan.decided.logical.ops)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hint", [S(0), S(1)], ids=str)
def test_cells_of_split_weights(hint: Sbp) -> None:
    model = Unrolled(nn.LSTMCell, width=7)
    flow.nn.shard(model, {"cell.weight_hh": hint})
    trains_alike(model, LINE)


def test_cells_in_micro_batches() -> None:
    trains_alike(Unrolled(nn.LSTMCell), LINE, micro_batches=2)


def test_cells_without_training() -> None:
    model = Unrolled(nn.LSTMCell).eval()
    x, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(flow.compile(model, placement=LINE)(x).full_tensor(), model(x))
