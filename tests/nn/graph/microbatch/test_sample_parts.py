"""Eager parts in micro-batches and in stages: one for each micro-batch, with the values of one device, or refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import GRID, LINE, trains_alike
from tests.ranks import Ranks


class Each(nn.Module):
    """Does to each sample what its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        keep = (y.sum(-1) > 0).nonzero()[:, 0]
        return y.index_add(0, keep, y[keep].tanh())


class Mixed(Each):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * y[y > 0].mean()


class Drawing(Each):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Counting(Each):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().forward(x)


def around(part: type[nn.Module] = Each) -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), flow.nn.eager(part()), nn.Linear(8, 3)).double()


def staged(stages: list[flow.Placement]) -> Any:
    """Layers with a part in each, on stages."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), flow.nn.eager(Each())) for _ in stages]
    model = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3)).double()
    flow.nn.pipeline(layers, stages)
    return model


ONE, TWO = flow.placement("cpu", [0, 1]), flow.placement("cpu", [2, 3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("many", [2, 3], ids=["even", "uneven"])
@pytest.mark.parametrize("where", [LINE, GRID], ids=["line", "grid"])
def test_a_part_runs_for_each_micro_batch(where: flow.Placement, many: int) -> None:
    trains_alike(around(), where, micro_batches=many)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved", "zb_v", "chimera"])
def test_parts_run_in_stages(schedule: str) -> None:
    stages = {"interleaved": [ONE, TWO] * 2, "zb_v": [ONE, TWO, TWO, ONE]}.get(schedule, [ONE, TWO])
    trains_alike(staged(stages), None, micro_batches=4, schedule=schedule)  # type: ignore[arg-type]


def test_a_stage_that_is_run_again_leaves_its_part_out() -> None:
    model = staged([ONE, TWO])
    flow.nn.recompute(model[1])
    calls: list[int] = []
    model[1][1].register_forward_hook(lambda *_: calls.append(1))
    trains_alike(model, None, steps=2, micro_batches=2)  # type: ignore[arg-type]
    assert len(calls) <= 2 * 2 + 40  # those of trials


def in_processes() -> None:
    trains_alike(staged([ONE, TWO]), None, steps=2, micro_batches=2)  # type: ignore[arg-type]


@pytest.mark.sweep
def test_parts_of_stages_in_processes(ranks4: Ranks) -> None:
    ranks4(in_processes)


def test_a_part_sees_arguments_and_flags_of_its_samples() -> None:
    @flow.nn.eager
    def kept(z: Tensor, y: Tensor, times: int) -> dict[str, Any]:
        found = [float(n) for n in y]
        return {"z": z * torch.tensor(found, dtype=z.dtype)[:, None] * times, "many": times}

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(kept(model(x), y, 2)["z"], y)

    trains_alike(around()[:2].append(nn.Linear(8, 3)).double(), LINE, loss=loss, micro_batches=2)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (Mixed, "it was tried on values that were made up"),
        (Drawing, "it draws random numbers"),
        (Counting, "it writes to seen, once for the whole batch"),
    ],
)
def test_a_part_that_mixes_samples_is_refused(part: type[nn.Module], why: str) -> None:
    with pytest.raises(SbpError, match=rf"the eager part {part.__name__}, called at 2, .*\n  {why}"):
        trains_alike(around(part), LINE, micro_batches=2)


def test_a_mean_over_those_that_have_a_label_is_none_of_samples() -> None:
    @flow.nn.eager
    def picked(z: Tensor, y: Tensor) -> Tensor:
        keep = (y >= 0).nonzero()[:, 0]
        return z - z[keep].mean()

    model = around()[:2].append(nn.Linear(8, 3)).double()
    with pytest.raises(SbpError, match=r"needs more than one micro-batch at once"):
        trains_alike(model, LINE, loss=lambda m, x, y: F.cross_entropy(picked(m(x), y), y), micro_batches=2)
