"""Moves of a model as `flow.record` tells them: which layer each is for, and their totals."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from tests.nn.graph.alike import GRID, batch, loss_fn, net, sgd


class Block(nn.Module):
    """One of several equal ones, whose lines are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(self.up(x).relu()))
        return out


def test_moves_are_those_of_a_layer_and_not_of_the_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    flow.nn.to_global(model, GRID, {"*.up.*": (B, S(0)), "*.down.weight": (B, S(1)), "*": B})
    x = flow.tensor(torch.randn(8, 8), placement=GRID, sbp=(S(0), B))
    with flow.record() as moves:
        F.mse_loss(model(x), x).backward()  # type: ignore[no-untyped-call]
    sent = [move for move in moves if move.bytes]
    forward = [move.layer for move in sent if move.op not in ("gradient", "box backward")]
    assert forward == ["0.norm", "1.norm"]
    backward = {move.layer for move in moves if move.op == "box backward"}
    assert backward == {f"{at}.{name}" for at in range(2) for name in ("down", "norm", "up")} - {"0.up"}
    assert not any(move.line == moves[-1].line for move in moves if move.op == "box backward")
    gradients = [move.layer for move in sent if move.op == "gradient"]
    assert sorted(gradients) == sorted(name for name, _ in model.named_parameters())
    last = str(moves).splitlines()[-1]
    assert (
        last == f"{len(moves)} moves: {moves.bytes} bytes to a rank, {sum(m.boxing.total for m in moves)} sent in all"
    )


def test_moves_of_a_graph_name_what_moves() -> None:
    model = net()
    flow.nn.shard(model, {"0.weight": {"tensor": S(0)}, "2.weight": {"tensor": S(1)}})
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    step(*batch())
    with flow.record() as moves:
        step(*batch())
    assert any(move.op.startswith("2.linear") and move.bytes for move in moves)
    assert not any(move.op == "box" for move in moves)


def test_hooks_of_a_record_go_with_it() -> None:
    before = len(nn.modules.module._global_forward_pre_hooks)
    with flow.record(), flow.record():
        assert len(nn.modules.module._global_forward_pre_hooks) == before + 1
    assert len(nn.modules.module._global_forward_pre_hooks) == before


class Counted(nn.Linear):
    """A layer that notes how often it is traced; if it counted in a number, each would be, so that this is right."""

    calls: ClassVar[list[None]] = []

    def forward(self, x: Tensor) -> Tensor:
        Counted.calls.append(None)
        return super().forward(x)


def test_equal_layers_are_traced_once_under_a_record_too() -> None:
    forward = flow.compile(nn.Sequential(*[Counted(4, 4) for _ in range(3)]), placement=GRID)
    with torch.no_grad(), flow.record():
        forward(torch.ones(8, 4))
    assert len(Counted.calls) == 1
