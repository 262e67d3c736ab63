"""Values that a line keeps in pieces: gathered once for all that use them, and again for the backward, also in
pipelines, whose steps are those of one device."""

import copy

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.plan.check import Checked

LAYERS = 4
X = torch.randn(8, 6, 16, dtype=torch.float64)
SEQUENCE = """
layers.*.{q,k,v}.weight: tensor=S(0)
layers.*.out.weight: tensor=S(1)
layers.*.norm -> tensor=S(1)
layers.* -> tensor=S(1)
hold **
"""
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved v=2", "dualpipe_v")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        found: Tensor = x + self.out(self.q(y) * self.k(y).tanh() * self.v(y))
        return found


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def checked(plan: str, width: int = 1024) -> Checked:
    with torch.device("meta"):
        model, x = Net(width), torch.empty(64, 512, width)
    return flow.Plan.read(plan).check(model, x, loss_fn=loss_of, cluster="h100x8")


@pytest.mark.parametrize("head", ["", "4 micro-batches\ndraw by micro-batch\n"], ids=["whole", "micro-batches"])
def test_what_three_products_take_is_gathered_and_priced_once(head: str) -> None:
    found = checked(f"grid cuda (tensor=4)\n{head}{SEQUENCE}")
    gathers = [
        row for row in found.report.moves if row.route == "all_gather over tensor" and row.direction != "backward"
    ]
    assert {row.direction for row in gathers} == {"forward", "again"}
    assert {
        row.direction: sum(other.count for other in gathers if other.direction == row.direction) for row in gathers
    } == {
        "forward": LAYERS,
        "again": LAYERS,
    }
    for row in gathers:
        assert row.seconds == pytest.approx(row.boxing.price.time, rel=1e-6)


def test_a_pipeline_gathers_pieces_again_for_the_backward() -> None:
    plan = f"grid cuda (pipe=2, tensor=4)\n{SEQUENCE}pipe layers over pipe by 1f1b, 4 micro-batches\n"
    again = [row for row in checked(plan).report.moves if row.direction == "again"]
    assert {row.route for row in again} == {"all_gather over tensor"}
    assert sum(row.count for row in again) == LAYERS


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("more", ["", "recompute layers.*\n"], ids=["kept", "again"])
def test_steps_are_those_of_one_device(schedule: str, more: str) -> None:
    torch.manual_seed(0)
    alone = Net().double()
    model = copy.deepcopy(alone)
    plan = f"grid (pipe=2, tensor=2)\n{SEQUENCE}{more}pipe layers over pipe by {schedule}, 4 micro-batches"
    step = flow.compile(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), plan=plan)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(alone, X)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        torch.testing.assert_close(step(X), loss.detach())
    for name, ours in model.state_dict().items():
        torch.testing.assert_close(ours, alone.state_dict()[name])
