"""Parts in graphs: values, gradients, buffers and Python's values are those of eager code on one device."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.placement.errors import ShapeError
from tests.nn.graph.alike import GRID, LINE, batch, compiled, eager, loss_fn, net, same, same_model, sgd, trains_alike


class Masked(nn.Module):
    """Its mean is of as many numbers as are positive."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x[x > 0].mean()
        return x * 2 * mean if mean > 0.2 else x * mean


class Counting(nn.Module):
    """Draws, has running statistics, a count of its own and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.steps = nn.BatchNorm1d(8), nn.Dropout(0.5), 0
        self.means: list[float] = []
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Any:
        self.seen += len(x)
        self.steps += 1
        self.means.append(x.mean().item())
        return self.drop(self.norm(x))


class Around(nn.Module):
    """Layers, a part between them, and draws on both sides."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.part, self.last = nn.Linear(4, 8), part, nn.Linear(8, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.part(self.drop(torch.tanh(self.first(x))))))
        return out


def around(part: nn.Module, drop: float = 0.0) -> tuple[Any, Any]:
    """A model with a marked part, and the same for one device."""
    model: Any = Around(part).double()
    model.drop.p = drop
    one = copy.deepcopy(model)
    flow.nn.eager(model.part)
    return model, one


def alike(model: Any, one: Any, step: Any, ones: Any, at: int, rows: int = 8) -> None:
    x, y = batch(rows, at)
    torch.manual_seed(at)
    loss = step(x, y)
    torch.manual_seed(at)
    same(loss, eager(one, loss_fn, ones, x, y))
    same_model(model, one)


def test_a_part_draws_and_counts_as_on_one_device_and_is_captured_once() -> None:
    model, one = around(Counting(), 0.1)
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=GRID), sgd(one)
    for at in range(3):
        alike(model, one, step, ones, at)
    assert (model.part.steps, model.part.seen.item()) == (3, 24)
    assert np.allclose(model.part.means, one.part.means)
    assert compiled(step) == 1
    for each in (model, one):
        each.eval()
    alike(model, one, step, ones, 3)


def test_edits_between_steps_count() -> None:
    model, one = around(nn.Sequential(nn.Linear(8, 8), Counting()))
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=LINE), sgd(one)
    alike(model, one, step, ones, 0)
    for each in (model, one):
        each.part[1].norm.momentum, each.part[1].drop.p = 0.5, 0.0
        with torch.no_grad():
            each.part[0].weight.mul_(2)
    alike(model, one, step, ones, 1)


@pytest.mark.parametrize("rows", [8, 9], ids=["even", "uneven"])
def test_samples_in_pieces_stay_so(rows: int) -> None:
    model, one = around(nn.Sequential(nn.Linear(8, 8), Masked()))
    flow.nn.shard(model, {"*": {"data": B}})
    flow.nn.flow(model.part, input={"data": S(0)}, result={"data": S(0)})
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=GRID), sgd(one)
    for at in range(2):
        alike(model, one, step, ones, at, rows)
    called = next(line for line in step.text().splitlines() if "eager::" in line)
    assert "(S(0), B) grad" in called


def test_weights_in_pieces_are_gathered_for_a_part() -> None:
    model, one = around(nn.Sequential(nn.Linear(8, 8), Masked()))
    flow.nn.shard(model, {"*": S(0)})
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=LINE), sgd(one)
    for at in range(2):
        alike(model, one, step, ones, at)


@flow.nn.eager
def matched(z: Tensor, targets: Tensor) -> dict[str, Any]:
    """Pairs by lowest cost, chosen outside of torch, and the loss of these."""
    cost = torch.cdist(z, targets).detach().numpy()
    pairs = np.argsort(cost[:, 0])
    return {"loss": F.mse_loss(z[torch.as_tensor(pairs)], targets), "pairs": len(pairs), "costs": None}


def test_a_loss_by_numpy() -> None:
    trains_alike(net(), GRID, loss=lambda model, x, y: matched(model(x), x[:, :3])["loss"])


@flow.nn.eager
def spoken(z: Tensor, y: Tensor) -> Tensor:
    """A loss whose lengths are read on the host."""
    lengths = [int(n) for n in y % 2 + 1]
    scores = z.reshape(2, 4, 3).transpose(0, 1).log_softmax(-1).transpose(0, 1)[:, : len(lengths)]
    targets = torch.ones(4, 2, dtype=torch.long)
    return F.ctc_loss(scores, targets, torch.full((4,), 2), torch.ones(4, dtype=torch.long)) * sum(lengths)


def test_a_loss_with_lengths_on_the_host() -> None:
    trains_alike(net(), LINE, loss=lambda model, x, y: spoken(model(x), y))


@flow.nn.eager
def picked(layer: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    keep = y.nonzero()[:, 0]
    return F.cross_entropy(layer(z)[keep], y[keep])


def test_a_module_among_the_arguments_is_trained() -> None:
    trains_alike(net(), GRID, loss=lambda model, x, y: picked(model[2], model[:2](x), y))


class Penalised(nn.Module):
    """Asks autograd while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        out: Tensor = y + g
        return out


def test_gradients_inside_of_a_part() -> None:
    trains_alike(around(Penalised())[0], GRID)


class Called(Masked):
    steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x)


def test_a_region_that_is_run_again_leaves_its_part_out() -> None:
    model: Any = nn.Sequential(around(Called())[0])
    flow.nn.recompute(model[0])
    trains_alike(model, GRID)
    assert model[0].part.steps == 3


@pytest.mark.parametrize("where", [LINE, GRID], ids=["line", "grid"])
def test_one_module_called_twice_and_in_repeated_layers(where: flow.Placement) -> None:
    part = flow.nn.eager(nn.Sequential(nn.Linear(8, 8), Masked()))
    layers = [nn.Sequential(nn.Linear(8, 8), flow.nn.eager(Masked())) for _ in range(3)]
    trains_alike(nn.Sequential(nn.Linear(4, 8), part, *layers, part, nn.Linear(8, 3)).double(), where)


def test_autocast_holds_inside() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return typed(model, x, y)

    trains_alike(net(torch.float32), GRID, loss=loss, tolerance=1e-2)


@flow.nn.eager
def typed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = model(x)
    assert z.dtype is torch.bfloat16
    return F.cross_entropy(z.float(), y)


def test_a_part_of_which_nothing_is_used_runs() -> None:
    seen: list[float] = []

    @flow.nn.eager
    def noted(z: Tensor) -> Tensor:
        seen.append(z.sum().item())
        return z

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        z = model(x)
        noted(z)
        return F.cross_entropy(z, y)

    step = flow.compile(net(), loss, placement=GRID)
    tried = len(seen)
    step(*batch())
    step(*batch())
    assert len(seen) >= tried + 2


def test_what_is_told_of_a_part(tmp_path: Path) -> None:
    model, _ = around(Masked())
    step = flow.compile(model, loss_fn, sgd(model), placement=GRID)
    step(*batch())
    report = step.explain()
    line = "part runs eagerly: its seconds and moves are in none of these figures, as Python says what they are"
    line += " while it runs"
    assert f"  eager   {line}" in str(report)
    assert f"eager: {line}" in report.full()
    assert report.dict()["eager"] == [line]
    assert "part runs eagerly, and what it keeps inside is not counted" in str(report)
    assert "eager::Masked(" in step.text()
    step.draw(tmp_path / "step.svg", full=True)
    assert "eager.Masked" in (tmp_path / "step.svg").read_text()


# Refused


def test_a_step_whose_part_gives_back_another_size_is_an_error() -> None:
    kept = flow.nn.eager(lambda z, y: z[y > 0])
    step = flow.compile(net(), lambda model, x, y: kept(model(x), y).mean(), placement=LINE)
    x, y = batch()
    step(x, torch.ones_like(y))
    with pytest.raises(
        ShapeError, match=r"gave back a tensor \(2, 3\).*a tensor \(8, 3\).*\n.*test_part.py.*\n.*padded"
    ):
        step(x, (torch.arange(8) < 2).long())


def test_a_number_that_changes_is_an_error() -> None:
    counted = flow.nn.eager(lambda z, y: (z.mean(), int(y.sum())))
    step = flow.compile(net(), lambda model, x, y: counted(model(x), y)[0], placement=LINE)
    x, y = batch()
    step(x, torch.ones_like(y))
    with pytest.raises(ShapeError, match=r"gave back 0 at 1, and 8 when"):
        step(x, torch.zeros_like(y))
