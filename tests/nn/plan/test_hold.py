"""A plan that is held runs as its lines say, and as on one device; one that is not says what was changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.plan.check import Checked
from sbpflow.placement.errors import SbpError

X, Y = torch.randn(16, 6, 8, dtype=torch.float64), torch.randint(8, (16, 6))
TENSOR = """
layers.*.up: tensor=S(0)
layers.*.down.weight: tensor=S(1)
"""
SEQUENCE = """
layers.* -> tensor=S(1)
layers.*.{norm,down} -> tensor=S(1)
"""
CUT = "\ninput x <- data=S(0)\ninput y <- data=S(0)"
PLANS = {
    "tensor": f"grid (tensor=2){TENSOR}",
    "sequence": f"grid (data=2, tensor=2){TENSOR}{SEQUENCE}{CUT}",
    "ZeRO-3": f"grid (data=4)\n**: data=S(0){CUT}",
    "vocabulary": "grid (tensor=4)\nhead: tensor=S(0)",
    "pipeline": f"grid (pipe=2, tensor=2){TENSOR}pipe layers over pipe by 1f1b, 4 micro-batches",
    "accumulated": f"grid (data=2)\n{{grads,states}} **: data=S(0){CUT}\n4 micro-batches",
    "some layers": f"grid (data=2, tensor=2){TENSOR}input x <- data=S(0)",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def checked(plan: str, **more: Any) -> Checked:
    return flow.Plan.read(plan).check(net(), (X, Y), loss_fn=loss_fn, **more)


@pytest.mark.parametrize("name", PLANS)
def test_a_held_plan_trains_as_one_device_does(name: str) -> None:
    alone, model = net(), net()
    optimizer = adamw(alone)
    path = "layers.[1:3]" if name == "some layers" else "**"
    step = flow.compile(model, loss_fn, adamw(model), plan=f"{PLANS[name]}\nhold {path}")
    for _ in range(3):
        loss = loss_fn(alone, X, Y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert abs(step(X, Y).item() - loss.item()) < 1e-12
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one, torch.as_tensor(other.detach().numpy()), atol=1e-12)


HELD = {
    "tensor": "expect 1 all_reduce over tensor a layer forward\nexpect 1 all_reduce over tensor a layer backward",
    "sequence": "expect 1 all_gather and 1 reduce_scatter over tensor a layer forward",
    "ZeRO-3": "expect no all_to_all\nexpect no all_reduce over data a layer",
    "vocabulary": "expect no all_gather over tensor forward",
}


@pytest.mark.parametrize("name", HELD)
def test_its_moves_are_those_of_the_lines(name: str) -> None:
    for finding in checked(f"{PLANS[name]}\n{HELD[name]}\nhold **", cluster="h100x8").findings:
        assert finding.holds, finding


def test_a_check_says_what_was_changed_and_nothing_where_it_is_held() -> None:
    """One row of a batch is not worth a move between nodes: everything is computed on all ranks."""
    lines = f"grid cuda (data=16){CUT}"
    free, kept = (checked(f"{lines}{more}", cluster="a100x8*2") for more in ("", "\nhold **"))
    assert not kept.changed
    assert free.changed is not None
    assert free.changed.ops > 0
    assert str(free.changed) in str(free)
    assert free.dict()["changed"]["ops"] == free.changed.ops
    assert free.seconds <= kept.seconds


def test_lines_that_meet_nothing_and_paths_that_are_none_are_refused() -> None:
    with pytest.raises(SbpError, match="has nothing called layer"):
        checked("grid (tensor=2)\nhold layer")
    with pytest.raises(SbpError, match="paths of modules"):
        flow.compile(net(), loss_fn, placement=flow.placement("cpu", range(2)), hold="layers")
