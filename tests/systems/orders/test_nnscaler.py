"""nnScaler: op-transform, op-assign and op-order build 1F1B, a plan like Chimera's, and co-sharding.

transform   signatures (`flow.nn.shard`), micro-batches, and pieces of a layer as modules
assign      `flow.nn.place`
order       a table of a schedule
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S
from sbpflow.actors import Schedule, published
from tests.nn.graph.memory.test_liveness import Live
from tests.nn.graph.pipes import ALONE2, ALONE4, PAIRS, mlp, trains

ORDER = Schedule("ordered", table=("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"))
BOTH_WAYS = Schedule(
    "both_ways",
    way="routes",
    table=("F0 F2 f1 b1 f3 b3 B0 B2", "F0 f1 F2 f3 b1 B0 b3 B2", "f1 F0 f3 F2 B0 b1 B2 b3", "f1 f3 F0 B0 F2 B2 b1 b3"),
)


@pytest.mark.parametrize("split", [False, True])
def test_the_three_primitives_build_1f1b(split: bool) -> None:
    """Layers are assigned by hand and ordered word by word; with a transform each stage is on two ranks."""
    model = mlp().double()
    stages = PAIRS if split else ALONE2
    for at, layer in enumerate(model):
        flow.nn.place(layer, stages[at // 2])
    if split:
        flow.nn.shard(model, {"*.weight": S(0)})
    assert ORDER.show().order == published("1f1b").show(2, 4).order
    trains(model, schedule=ORDER, steps=2)


def test_the_three_primitives_build_a_plan_like_chimera_s() -> None:
    """Both routes, ordered by hand: it ends when Chimera does, and trains as one device."""
    assert BOTH_WAYS.show().end == published("chimera").show(4, 4).end == 16
    model = mlp().double()
    for layer, stage in zip(model, ALONE4, strict=True):
        flow.nn.place(layer, stage)
    trains(model, schedule=BOTH_WAYS, steps=2)


class Wide(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Piece(nn.Module):
    """Some of the inner features of a layer, whose weights it has."""

    def __init__(self, of: Wide, first: int, end: int) -> None:
        super().__init__()
        self.of, self.first, self.end = of, first, end

    def forward(self, x: Tensor) -> Tensor:
        inside = slice(self.first, self.end)
        y = F.gelu(F.linear(x, self.of.up.weight[inside], self.of.up.bias[inside]))
        return F.linear(y, self.of.down.weight[:, inside])


class CoShard(nn.Module):
    """The pieces of a layer one after the other on its device, each run again in the backward."""

    def __init__(self, of: Wide, pieces: int) -> None:
        super().__init__()
        self.bias, inside = of.down.bias, of.up.out_features
        self.pieces = nn.ModuleList(Piece(of, inside * n // pieces, inside * (n + 1) // pieces) for n in range(pieces))
        flow.nn.recompute(list(self.pieces))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bias
        for piece in self.pieces:
            y = y + piece(x)
        return y


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def test_a_co_shard_computes_what_the_layer_does_in_less_memory() -> None:
    whole = nn.Sequential(*(Wide(8, 64) for _ in range(3))).double()
    parts = copy.deepcopy(whole)
    parts = nn.Sequential(*(CoShard(layer, 4) for layer in parts))  # type: ignore[arg-type]
    x = torch.randn(64, 8, dtype=torch.float64)
    peaks = []
    for model in (whole, parts):
        step = flow.compile(model, loss_fn, placement=flow.placement("cpu", [0]))
        step(x)
        model.zero_grad()
        with Live() as live:
            loss = step(x)
        peaks.append(live.peak)
        torch.testing.assert_close(loss.full_tensor(), loss_fn(whole, x).detach())
    for ours, theirs in zip(parts[0].pieces[0].of.parameters(), whole[0].parameters(), strict=True):  # type: ignore[union-attr, index]
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())  # type: ignore[union-attr]
    assert peaks[1] < 0.6 * peaks[0]


def test_plan_lines_direct_the_same() -> None:
    """As Piper's directives: the same stages and the same order as lines beside the model, which stays as it is."""
    plan = flow.Plan.read("""
grid cpu (pipe=2, data=2)
pipe layers over pipe by zb_h1, 4 micro-batches
layers.*.weight: data=S(0)
""")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = Net()
    alone, x = copy.deepcopy(model), torch.randn(8, 6)
    step = flow.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    assert step(x).item() == pytest.approx(loss_fn(alone, x).item(), rel=1e-5)
    placements = [str(getattr(weight, "placement", "")) for weight in model.layers.parameters()]
    assert placements[0] == "cpu:[0-1] as (data=2)"
    assert placements[-1] == "cpu:[2-3] as (data=2)"
