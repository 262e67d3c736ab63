"""Local SGD, DiLoCo and streaming DiLoCo: groups train apart, and meet as their papers say, in as many bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S
from tests.ranks import Ranks

from .letters import held_out_loss, letters, read_loss, reader
from .stages import WIDTH, cut, layers, numbers, squares, whole

GROUPS = 4
GRID = flow.placement("cpu", range(GROUPS), names=("data",))
PAIRS = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))


def apart(make: Any, inner: Any, grid: Any = GRID, loss: Any = squares) -> tuple[nn.Module, list[nn.Module], list[Any]]:
    """An outer model, those of the groups, and their steps."""
    places = [grid.at(data=i) for i in range(grid.shape[0])]
    models = [flow.nn.to_global(make(), where) for where in places]
    pairs = zip(models, places, strict=True)
    steps = [flow.compile(model, loss, inner(model.parameters()), placement=where) for model, where in pairs]
    outer = flow.nn.to_global(make(), grid, lambda name, x: {"data": S(0) if x.ndim else B})
    return outer, models, steps


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def local(every: int, steps: int, grid: Any = GRID) -> list[Tensor]:
    """Local SGD: the mean every so many steps."""
    outer, models, each = apart(lambda: layers(3), sgd, grid)
    for at in range(steps):
        for step, batch in zip(each, cut(*numbers(8 * len(each), at), len(each)), strict=True):
            step(*batch)
        if (at + 1) % every == 0:
            flow.nn.meet(outer, models, axis="data")
    return whole(outer)


@pytest.mark.parametrize("grid", [GRID, PAIRS], ids=str)
def test_local_sgd_that_meets_in_each_step_is_data_parallel(grid: Any) -> None:
    model = layers(3)
    optimizer = sgd(model.parameters())
    for at in range(4):
        optimizer.zero_grad()
        squares(model, *numbers(8 * grid.shape[0], at)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(local(1, 4, grid), [*model.parameters()], rtol=0, atol=1e-14)


def test_between_meetings_groups_go_their_own_ways() -> None:
    models = [layers(3) for _ in range(GROUPS)]
    for at in range(6):
        for model, batch in zip(models, cut(*numbers(8 * GROUPS, at), GROUPS), strict=True):
            grads = torch.autograd.grad(squares(model, *batch), [*model.parameters()])
            for w, g in zip(model.parameters(), grads, strict=True):
                w.data.sub_(g, alpha=0.1)
        if (at + 1) % 3 == 0:
            for ws in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([w.detach() for w in ws]).mean(0)
                for w in ws:
                    w.data.copy_(mean)
    torch.testing.assert_close(local(3, 6), [*models[0].parameters()], rtol=0, atol=1e-14)


def test_four_processes_meet(ranks4: Ranks) -> None:
    expected = local(3, 6)
    for found in ranks4(local, 3, 6):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def nesterov(model: nn.Module, lr: float = 0.7) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def sent(moves: Any) -> int:
    return sum(move.boxing.total for move in moves)


def test_an_outer_step_of_diloco_sends_what_one_all_reduce_does() -> None:
    """2(n-1)/n of the parameters a rank, where data parallel training sends that in each of the inner steps."""
    outer, models, _ = apart(lambda: layers(3), sgd)
    optimizer = nesterov(outer)
    with flow.record() as moves:
        flow.nn.meet(outer, models, optimizer, axis="data")
    size = sum(p.numel() * 8 for p in layers(3).parameters())
    assert sent(moves) == GROUPS * (2 * (GROUPS - 1) * size // GROUPS)


def test_a_streamed_meeting_sends_its_fragment() -> None:
    outer, models, steps = apart(lambda: layers(3), sgd)
    optimizer, before = nesterov(outer), whole(outer)
    for step in steps:
        step(*numbers(8))
    size = (WIDTH * WIDTH + WIDTH) * 8
    for at in range(3):
        with flow.record() as moves:
            flow.nn.meet(outer, models, optimizer, axis="data", part=str(at))
        assert sent(moves) == GROUPS * (2 * (GROUPS - 1) * size // GROUPS)  # a third of all at once
        moved = [not torch.equal(x, y) for x, y in zip(whole(outer), before, strict=True)]
        assert moved == [True] * 2 * (at + 1) + [False] * 2 * (2 - at)


def test_an_outer_step_is_that_of_nesterov_on_the_mean() -> None:
    """As the paper has it: the outer gradient is how far the outer model is from the mean of the groups."""
    outer, models, steps = apart(lambda: layers(3), sgd)
    optimizer, plain = nesterov(outer), layers(3)
    its = nesterov(plain)
    for at in range(3):
        for step, batch in zip(steps, cut(*numbers(8 * GROUPS, at), GROUPS), strict=True):
            step(*batch)
        for w, *ws in zip(plain.parameters(), *map(whole, models), strict=True):
            w.grad = w.detach() - torch.stack(ws).mean(0)
        its.step()
        flow.nn.meet(outer, models, optimizer, axis="data")
        torch.testing.assert_close(whole(outer), [*plain.parameters()], rtol=0, atol=1e-14)
        assert all(torch.equal(x, y) for model in models for x, y in zip(whole(model), whole(outer), strict=True))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


@pytest.mark.sweep
def test_a_model_of_bytes_learns_as_well_as_in_step() -> None:
    """Two groups, eight inner steps to a meeting, streamed in the last third; against one model on both batches. The
    outer rate of the paper, 0.7, is for more than these few meetings."""
    grid = flow.placement("cpu", range(2), names=("data",))
    outer, models, steps = apart(reader, adam, grid, read_loss)
    optimizer, parts = nesterov(outer, 0.3), [name for name, _ in outer.named_children()]
    alone = reader()
    its = adam(alone.parameters())
    for at in range(240):
        x, y = letters(64, at)
        for step, batch in zip(steps, cut(x, y, 2), strict=True):
            step(*batch)
        if at < 160 and at % 8 == 7:
            flow.nn.meet(outer, models, optimizer, axis="data")
        elif at >= 160 and at % 2 == 1:
            flow.nn.meet(outer, models, optimizer, axis="data", part=parts[at // 2 % len(parts)])
        its.zero_grad()
        read_loss(alone, x, y).backward()  # type: ignore[no-untyped-call]
        its.step()
    mine, one = held_out_loss(outer), held_out_loss(alone)
    assert one < 3.4  # it began with 4.9
    assert mine < 1.02 * one


def test_running_statistics_become_means() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH).double()

        def forward(self, x: Tensor) -> Any:
            return self.norm(x)

    outer, models, steps = apart(Running, sgd)
    for at, step in enumerate(steps):
        step(*numbers(8, at))
    mean = torch.stack([m.norm.running_mean.full_tensor() for m in models]).mean(0)  # type: ignore[union-attr, operator]
    flow.nn.meet(outer, models, axis="data")
    for model in (outer, *models):
        torch.testing.assert_close(model.norm.running_mean.full_tensor(), mean)  # type: ignore[union-attr, operator]
        assert model.norm.num_batches_tracked.full_tensor() == 1  # type: ignore[union-attr, operator]


def test_what_cannot_be() -> None:
    outer, models, _ = apart(lambda: layers(2), sgd)
    with pytest.raises(flow.SbpflowError, match="one tensor of each of its 4 groups"):
        flow.nn.meet(outer, models[:3], axis="data")
    with pytest.raises(flow.SbpflowError, match="there are no models"):
        flow.nn.meet(outer, [], axis="data")
    with pytest.raises(flow.SbpflowError, match="model 1 of those apart has other parameters"):
        flow.nn.meet(outer, [models[0], layers(3), *models[2:]], axis="data")
    with pytest.raises(flow.SbpflowError, match="has no module 'head'\n  it has 0, 1"):
        flow.nn.meet(outer, models, axis="data", part="head")
    with pytest.raises(flow.SbpflowError, match=r"0.0.weight of the outer model is none of the optimizer's"):
        flow.nn.meet(outer, models, sgd(models[0].parameters()), axis="data")
    with pytest.raises(flow.SbpflowError, match="the outer model is on no ranks yet"):
        flow.nn.meet(layers(2), models, axis="data")
    with pytest.raises(flow.SbpflowError, match="no axis"):
        flow.nn.meet(outer, models, axis="tensor")


def test_weights_that_are_frozen_in_the_outer_model_alone_are_refused() -> None:
    """They were overwritten, with all that groups had trained of them."""
    grid = flow.placement("cpu", range(2), names=("data",))
    models = [flow.nn.to_global(layers(1), grid.at(data=rank)) for rank in range(2)]
    outer = flow.nn.to_global(layers(1), grid, S(0))
    next(outer.parameters()).requires_grad_(False)
    with pytest.raises(flow.SbpError, match="is frozen in the outer model, and trained in one of those apart"):
        flow.nn.meet(outer, models, axis="data")
    next(outer.parameters()).requires_grad_(True)
    models[1].register_buffer("more", next(models[1].parameters()).detach())
    with pytest.raises(flow.SbpError, match="model 1 of those apart has other buffers"):
        flow.nn.meet(outer, models, axis="data")
