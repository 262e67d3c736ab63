"""Schedules without a flush are their recurrences to the bit; two routes; and what a pipelined step tells of itself."""

import copy
import gc
import json
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import sbpflow as flow
from sbpflow.actors.schedules.pipeline import version
from sbpflow.actors.schedules.published import published
from sbpflow.actors.schedules.schedule import Schedule

WIDTH = 8


def layers(count: int, *more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *copy.deepcopy(more), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*made).double()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, WIDTH).double(), torch.randn(samples, WIDTH).double()


def ranks(count: int) -> list[flow.Placement]:
    return [flow.placement("cpu", [rank]) for rank in range(count)]


def piped(
    model: nn.Sequential, stages: int, schedule: str | Schedule, micro_batches: int, optimizer: type = torch.optim.SGD
) -> flow.nn.Graph:
    flow.nn.pipeline(model, ranks(stages), schedule)
    return flow.compile(
        model, loss_fn, optimizer(model.parameters(), lr=0.1), micro_batches=micro_batches, schedule=schedule
    )


def recurrence(
    model: nn.Sequential, schedule: str | Schedule, micro_batches: int, optimizer: type, x: Tensor, y: Tensor
) -> list[float]:
    """One stage a layer: each sees the weights that the schedule says, and updates by itself."""
    plan, stages = schedule if isinstance(schedule, Schedule) else published(schedule), len(model)
    shape = plan.shape(stages, micro_batches)
    every = plan.value(plan.update, shape, 0)
    history = [[copy.deepcopy(layer)] for layer in model]
    each = [optimizer(layer.parameters(), lr=0.1) for layer in model]
    losses = []
    for k, (xs, ys) in enumerate(zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True)):
        seen = [history[s][version(plan, shape, s, k)] for s in range(stages)]
        loss = mse_loss(nn.Sequential(*seen)(xs), ys)
        losses.append(loss.item())
        found = iter(torch.autograd.grad(loss / every, [p for layer in seen for p in layer.parameters()]))
        for layer in model:
            for p in layer.parameters():
                grad = next(found)
                p.grad = grad if p.grad is None else p.grad + grad
        if (k + 1) % every == 0:
            for s, (layer, one) in enumerate(zip(model, each, strict=True)):
                one.step()
                one.zero_grad()
                history[s].append(copy.deepcopy(layer))
    return losses


APART = Schedule("apart", split=True, act="p-s", low_b="p-s-1", versions="p-s")
LATE = Schedule("late", split=True, act="p-s", stash="p", dy="s+1", low_w="s", versions="p", update="2")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"),
    [
        ("pipedream", 2, 8),
        ("pipedream", 4, 6),
        ("2bw", 3, 8),
        ("2bw", 4, 6),
        (APART, 2, 8),
        (APART, 4, 6),
        (LATE, 3, 6),
    ],
    ids=str,
)
def test_a_schedule_without_a_flush_is_its_recurrence_to_the_bit(
    schedule: str | Schedule, stages: int, micro_batches: int, optimizer: type
) -> None:
    model, (x, y) = layers(stages), batch(2 * micro_batches)
    plain = copy.deepcopy(model)
    losses = recurrence(plain, schedule, micro_batches, optimizer, x, y)
    loss = piped(model, stages, schedule, micro_batches, optimizer)(x, y)
    assert loss.item() == pytest.approx(sum(losses) / micro_batches, rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)  # type: ignore[attr-defined]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["chimera", "chimera_full", "gems"])
@pytest.mark.parametrize(("stages", "micro_batches", "samples"), [(2, 4, 8), (4, 5, 11), (4, 1, 3)])
def test_two_routes_train_as_one_device(schedule: str, stages: int, micro_batches: int, samples: int) -> None:
    model, (x, y) = layers(4), batch(samples)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    step = piped(model, stages, schedule, micro_batches, torch.optim.AdamW)
    for _ in range(3):
        loss = loss_fn(plain, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert step(x, y).item() == pytest.approx(loss.item(), rel=1e-10)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, rtol=0, atol=1e-10)  # type: ignore[attr-defined]


def test_numbers_drawn_are_the_same_under_every_schedule() -> None:
    losses, behind = in_torch()
    for stages, schedule in [(1, "1f1b"), (2, "gpipe"), (4, "1f1b"), (2, "zb_h1"), (2, "interleaved"), (4, "chimera")]:
        step = piped(layers(4, nn.Dropout(0.3)), stages, schedule, 4)
        torch.manual_seed(2)
        x, y = batch(8)
        torch.manual_seed(3)
        assert [step(x, y).item() for _ in range(2)] == pytest.approx(losses, rel=1e-12)
        assert torch.rand(1).item() == behind


def in_torch() -> tuple[list[float], float]:
    """The losses of two steps of one device with dropout, and the number that its generator gives behind them."""
    model = layers(4, nn.Dropout(0.3))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(2)
    x, y = batch(8)
    torch.manual_seed(3)
    for _ in range(2):
        loss = loss_fn(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.rand(1).item()


def test_a_step_tells_when_what_ran(tmp_path: Path) -> None:
    step = piped(layers(4), 4, "1f1b", 8)
    with pytest.raises(flow.SbpflowError, match="not called yet"):
        step.timeline()
    step(*batch(16))
    made = step.timeline(tmp_path / "step.json")
    assert made is not None
    assert "bubble" in made.summary()
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"].startswith("B") for event in events) == 2 * 4 * 8  # and simulated
    drawn = step.draw_actors(tmp_path / "actors.dot").read_text()
    assert drawn.count("subgraph") == 4 + 1  # a frame for each queue, and the legend
    assert all(f'label="device {rank}"' in drawn for rank in range(4))


def test_memory_of_a_pipeline_grows_with_what_is_under_way() -> None:
    def activations(schedule: str, stages: int = 4) -> list[int]:
        step = piped(layers(4), stages, schedule, 8)
        step(*batch(64))
        memory = step.explain().memory
        assert memory is not None
        return [held.activations for _, held in sorted(memory.ranks.items())]

    one, all_, two = activations("1f1b"), activations("gpipe"), activations("pipedream")
    assert one[0] > one[3]
    assert all(a > b for a, b in zip(all_, one, strict=True))
    assert two[0] > one[0]  # versions of the weights


def test_a_pipeline_that_nobody_has_leaves_no_thread() -> None:
    gc.collect()  # pipelines of other tests
    before = threading.active_count()
    model = layers(4)
    step = piped(model, 4, "pipedream", 4)
    step(*batch(8))
    assert threading.active_count() > before
    program = weakref.ref(step.planned.program)
    del step, model
    gc.collect()
    assert program() is None
    assert threading.active_count() == before


def test_what_a_schedule_without_a_flush_cannot_do() -> None:
    model, (x, y) = layers(2), batch(8)
    flow.nn.pipeline(model, ranks(2), "pipedream")
    with pytest.raises(flow.SbpflowError, match="without an optimizer"):
        flow.compile(model, loss_fn, micro_batches=4, schedule="pipedream")(x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(flow.SbpflowError, match="no norm of all gradients"):
        flow.compile(model, loss_fn, optimizer, micro_batches=4, schedule="pipedream", clip_grad_norm=1.0)(x, y)
    with pytest.raises(flow.SbpflowError, match="cuts sequences into slices"):
        flow.compile(model, loss_fn, micro_batches=4, schedule="terapipe")
