"""Hints for many parameters at once fit all of them, on any grid: one entry is for every axis, scalars are B."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, P, S

LINE = flow.placement("cpu", range(4))
GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
WHERE = pytest.mark.parametrize("where", [LINE, GRID], ids=["line", "grid"])


class Scaled(nn.Module):
    """With a counter among its buffers, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(6, 5), nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.line(x)) * self.scale


def model() -> Any:
    torch.manual_seed(0)
    return Scaled()


def losses(step: Any) -> list[float]:
    x = torch.linspace(-1, 1, 48).reshape(8, 6)
    return [step(x, x[:, :5]).item() for _ in range(3)]


def trained(module: nn.Module) -> list[float]:
    adamw = torch.optim.AdamW(module.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        adamw.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
        return loss

    return losses(step)


@WHERE
@pytest.mark.parametrize("said", [{"*": S(0)}, {"*": "S(0)"}, S(0)], ids=str)
def test_a_wildcard_shards_a_model_with_a_counter_and_a_scalar(said: Any, where: flow.Placement) -> None:
    made = flow.nn.to_global(model(), where, said)
    cut, whole = (S(0),) * where.ndim, (B,) * where.ndim
    lie = {name: value.sbp for name, value in made.state_dict().items()}
    assert {name for name, sbp in lie.items() if sbp == whole} == {"scale", "norm.num_batches_tracked"}
    assert all(sbp in (cut, whole) for sbp in lie.values())
    assert trained(made) == pytest.approx(trained(model()), rel=1e-4)


@pytest.mark.sampled(3)
@WHERE
@pytest.mark.parametrize("pattern", ["*", "line", "*.weight"])
def test_a_graph_keeps_a_hint_for_many(pattern: str, where: flow.Placement) -> None:
    made: Any = flow.nn.shard(model(), {pattern: S(0)})
    adamw = torch.optim.AdamW(made.parameters(), lr=0.1)
    step = flow.compile(made, lambda m, x, y: F.mse_loss(m(x), y), adamw, placement=where)
    assert losses(step) == pytest.approx(trained(model()), rel=1e-4)
    assert made.line.weight.sbp == (S(0),) * where.ndim
    assert made.scale.sbp == (B,) * where.ndim or pattern != "*"


@WHERE
def test_a_model_on_meta_is_made_by_a_wildcard(where: flow.Placement) -> None:
    with torch.device("meta"):
        made: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    flow.nn.materialise(flow.nn.shard(flow.nn.place(made, where), {"*": S(0)}))
    assert made[0].weight.sbp == (S(0),) * where.ndim


def test_of_several_entries_those_that_split_a_scalar_are_b() -> None:
    made: Any = flow.nn.to_global(model(), GRID, {"sc*": (P, S(0)), "*": {"tensor": S(-1)}})
    assert (made.scale.sbp, made.line.weight.sbp, made.norm.num_batches_tracked.sbp) == ((P, B), (B, S(1)), (B, B))


def test_a_scalar_that_is_named_cannot_be_split() -> None:
    with pytest.raises(flow.SbpflowError, match="without dims"):
        flow.nn.to_global(model(), LINE, {"scale": S(0)})
    with pytest.raises(flow.SbpflowError, match="no dim"):
        flow.nn.shard(model(), {"scale": S(0)})


def test_a_wildcard_of_a_dim_that_a_vector_lacks_is_still_told() -> None:
    with pytest.raises(flow.SbpflowError, match=r"to_global of line.bias \(5,\): S\(1\) is out of range"):
        flow.nn.to_global(model(), LINE, {"*": S(1)})
