"""Watched steps: lines with what is known, nothing read between them, and one writer of several ranks."""

import gc
import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.watching.figures import known_device
from tests.ranks import Ranks

ROWS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_fn(net: nn.Module, ids: Tensor) -> Tensor:
    return torch.as_tensor(net(ids).square().mean())


def step_of(plan: str = "grid (data=2)", **options: Any) -> Any:
    net = Net()
    return flow.compile(net, loss_fn, torch.optim.SGD(net.parameters(), lr=0.1), plan=plan, **options)


def batch(rows: int = ROWS) -> Tensor:
    return torch.arange(rows * 4).reshape(rows, 4) % 16


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_comes_every_so_many_steps_and_behind_the_last(tmp_path: Path) -> None:
    step, path, losses = step_of(clip_grad_norm=1.0), tmp_path / "a" / "run.jsonl", []
    with flow.watch(step, to=path, every=3) as train:
        losses = [train(batch()).item() for _ in range(7)]
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [3, 6, 7]
    assert [line["loss"] for line in lines] == [losses[2], losses[5], losses[6]]
    assert lines[-1]["norm"] == float(step.grad_norm)
    assert all(line["lr"] == 0.1 for line in lines)
    report = step.explain()
    for line in lines:
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(ROWS * 4)
        assert line["flops_per_second"] * line["seconds"] == pytest.approx(report.flops)
        assert line["predicted_gib"] * 2**30 == pytest.approx(report.memory.fullest)
        assert line["predicted_seconds"] == report.predicted
        assert line["gib"] > line["predicted_gib"]  # of the process, with Python and torch
    assert train.line == lines[-1]


def test_a_watched_step_gives_what_the_step_gives() -> None:
    alone, watched = step_of(), flow.watch(step_of(), progress=False)
    assert [alone(batch()).item() for _ in range(3)] == [watched(batch()).item() for _ in range(3)]


def test_nothing_is_read_between_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[flow.GlobalTensor] = []
    item = flow.GlobalTensor.item

    def noted(x: flow.GlobalTensor) -> Any:
        read.append(x)
        return item(x)

    monkeypatch.setattr(flow.GlobalTensor, "item", noted)
    with flow.watch(step_of(clip_grad_norm=1.0), every=5, progress=False) as train:
        for _ in range(4):
            train(batch())
        assert not read
        train(batch())
        assert len(read) == 2  # the loss and the norm
    assert len(read) == 2


def test_the_share_of_the_peak_is_that_of_one_device_for_each(tmp_path: Path) -> None:
    """One process has one processor, whatever ranks it plays."""
    step = step_of()
    with flow.watch(step, every=2, peak=1e9, progress=False) as train:
        train(batch())
        train(batch())
    assert train.line["mfu"] == pytest.approx(float(train.line["flops_per_second"]) / 1e9)


def test_without_a_known_peak_there_is_no_share_of_it() -> None:
    place = flow.placement("cpu", range(2))
    assert known_device(place) is None
    with flow.watch(step_of(), every=1, progress=False) as train:
        train(batch())
    assert "mfu" not in train.line
    known = flow.cluster("cpu")
    with flow.use_cluster(replace(known, device=replace(known.device, name="mine"))):
        assert known_device(place) is not None


def test_a_run_that_goes_on_counts_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for start in (0, 4):
        with flow.watch(step_of(), to=str(path), every=2, start=start, progress=False) as train:
            for _ in range(4):
                train(batch())
    assert [line["step"] for line in lines_of(path)] == [2, 4, 6, 8]


def test_a_batch_of_another_shape_is_another_plan(tmp_path: Path) -> None:
    path, step = tmp_path / "run.jsonl", step_of()
    with flow.watch(step, to=path, every=2, progress=False) as train:
        for rows in (4, 4, 4, 8):
            train(batch(rows))
    first, second = lines_of(path)
    assert "plans" not in first
    assert second["plans"] == 2
    of = [step.plan_for(batch(rows)).explain().flops for rows in (4, 8)]
    assert second["flops_per_second"] * second["seconds"] * 2 == pytest.approx(sum(of))
    assert second["tokens_per_second"] * second["seconds"] * 2 == pytest.approx(12 * 4)


def test_a_step_that_moves_to_another_plan_goes_on(tmp_path: Path) -> None:
    path, step = tmp_path / "run.jsonl", step_of()
    with flow.watch(step, to=path, every=1, progress=False) as train:
        train(batch())
        step.move("grid (data=4)")
        train(batch())
        gone = weakref.ref(step.planned)
        step.move("grid (data=2)")
        train(batch())
        gc.collect()
        assert gone() is None  # with all that it had compiled
    assert [line["step"] for line in lines_of(path)] == [1, 2, 3]
    assert [line.get("plans") for line in lines_of(path)] == [None, 2, 3]


def test_values_are_noted_for_the_next_line() -> None:
    with flow.watch(step_of(), every=2, progress=False) as train:
        train.note(held_out=torch.tensor(1.5), epoch=3)
        train(batch())
        train(batch())
        assert (train.line["held_out"], train.line["epoch"]) == (1.5, 3.0)
        train(batch())
        train(batch())
        assert "held_out" not in train.line
    with pytest.raises(flow.SbpError, match="lines have a loss of the step"):
        train.note(loss=3.0)
    with pytest.raises(flow.SbpError, match="takes a number, and got str"):
        train.note(name="a")  # type: ignore[arg-type]


def test_an_error_ends_the_block_and_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def fails() -> None:
        with flow.watch(step_of(), to=path, every=1, progress=False) as train:
            train(batch())
            raise KeyError("no such batch\nmore")

    with pytest.raises(KeyError):
        fails()
    first, last = lines_of(path)
    assert first["step"] == 1
    assert last == {"error": "KeyError: 'no such batch\\nmore'"}


def test_a_watch_that_has_ended_is_not_called() -> None:
    train = flow.watch(step_of(), progress=False)
    train(batch())
    train.close()
    train.close()
    with pytest.raises(flow.SbpError, match="this watch has ended"):
        train(batch())


@pytest.mark.parametrize(
    ("step", "how", "says"),
    [
        (Net, {}, "watch of Net, which is no step\n  watch what compile returns: flow.watch"),
        (lambda: loss_fn, {}, "watch of function, which is no step"),
        (lambda: flow.watch(step_of()), {}, "watch of a watched step\n  watch it once: to="),
        (step_of, {"every": 0}, "every=0\n  give a whole number from 1 on"),
        (step_of, {"start": -1}, "start=-1\n  give a whole number from 0 on"),
        (step_of, {"start": 9, "steps": 3}, "start=9 of steps=3\n  steps are those of the whole run"),
        (step_of, {"peak": 0.0}, "peak=0.0\n  give the FLOP/s of one device, as in peak=989e12"),
    ],
)
def test_a_mistake_is_told(step: Any, how: dict[str, Any], says: str) -> None:
    with pytest.raises(flow.SbpError, match=re.escape(says)):
        flow.watch(step(), **how)


def test_an_inference_has_samples_and_no_loss() -> None:
    net = nn.Linear(4, 4)
    with flow.watch(flow.compile(net, plan="grid (data=2)"), every=1, progress=False) as run:
        run(torch.ones(6, 4))
    assert "loss" not in run.line
    speed, seconds = (float(run.line[name]) for name in ("samples_per_second", "seconds"))
    assert speed * seconds == pytest.approx(6)


def test_a_pipeline_has_a_bubble_and_moves_that_were_seen() -> None:
    step = step_of("grid (pipe=2)\npipe layers over pipe by 1f1b, 4 micro-batches")
    with flow.watch(step, every=2, progress=False) as train:
        train(batch())
        train(batch())
    assert 0 <= float(train.line["bubble"]) < 1
    assert {"exposed", "hidden", "predicted_exposed"} <= train.line.keys()
    assert "predicted_hidden" not in train.line  # nobody knows it


def watched_rank(folder: str, plan: str) -> tuple[list[float], dict[str, Any]]:
    path = Path(folder) / "run.jsonl"
    with flow.watch(step_of(plan, clip_grad_norm=1.0), to=path, every=2) as train:
        losses = [train(batch()).item() for _ in range(3)]
    return losses, train.line


@pytest.mark.parametrize(
    "plan", ["grid (data=4)", "grid (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches"]
)
def test_of_several_ranks_the_first_writes_what_one_process_would(ranks4: Ranks, tmp_path: Path, plan: str) -> None:
    found = ranks4(watched_rank, str(tmp_path), plan)
    assert all(losses == found[0][0] for losses, _ in found)
    assert [bool(line) for _, line in found] == [True, False, False, False]
    (path,) = tmp_path.iterdir()
    lines = lines_of(path)
    assert [line["step"] for line in lines] == [2, 3]
    assert lines[-1]["loss"] == found[0][0][-1]
    assert lines[-1] == found[0][1]
    assert {"exposed", "waits", "slowest", "gib", "predicted_gib"} <= lines[-1].keys()
    alone = step_of(plan, clip_grad_norm=1.0)
    with flow.watch(alone, every=1, progress=False) as train:
        losses = [train(batch()).item() for _ in range(3)]
    assert losses == pytest.approx(found[0][0])
    assert train.line["norm"] == pytest.approx(lines[-1]["norm"])
