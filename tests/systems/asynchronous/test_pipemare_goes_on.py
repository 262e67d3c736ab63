"""PipeMare's corrected weights: the mean of late updates goes on, from checkpoints, in other plans and other steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.nn.graph.optimizer import adopted_model
from sbpflow.nn.graph.optimizer.late_mean import late_mean, means_of_step
from tests.ranks import Ranks

from .stages import layers, numbers, ranks, squares, whole

CORRECTED = "pipemare_corrected"


class Run:
    """A model, its optimizer and a step of it, in so many stages."""

    def __init__(self, stages: int = 2, schedule: str = CORRECTED) -> None:
        self.model = layers(2)
        flow.nn.pipeline(self.model, ranks(stages), schedule)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.step = flow.compile(self.model, squares, self.optimizer, micro_batches=6, schedule=schedule)

    def on(self, first: int, last: int) -> "Run":
        for at in range(first, last):
            self.step(*numbers(12, at))
        return self

    def save(self, path: Path) -> "Run":
        flow.save(path, self.model, optimizer=self.optimizer)
        return self

    def load(self, path: Path) -> "Run":
        flow.load(path, self.model, optimizer=self.optimizer)
        return self

    def means(self) -> list[Tensor | None]:
        found = [late_mean(x) for x in self.model.parameters()]
        return [x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in found]

    def equals(self, other: "Run") -> bool:
        pairs = zip(whole(self.model), whole(other.model), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("ran", [0, 1], ids=["fresh", "that_ran"])
def test_a_checkpoint_goes_on_to_the_bit(ran: int, tmp_path: Path) -> None:
    unbroken = Run().on(0, 2).save(tmp_path / "at").on(2, 4)
    assert Run().on(7, 7 + ran).load(tmp_path / "at").on(2, 4).equals(unbroken)


def test_without_the_mean_it_would_not(tmp_path: Path) -> None:
    unbroken, other = Run().on(0, 2).save(tmp_path / "at"), Run().load(tmp_path / "at")
    assert all(x is not None and x.any() for x in unbroken.means())
    for x in other.model.parameters():
        vars(x).clear()
    assert not other.on(2, 3).equals(unbroken.on(2, 3))


def _goes_on(path: str) -> list[Tensor]:
    Run().on(0, 2).save(Path(path))
    return whole(Run().load(Path(path)).on(2, 3).model)


@pytest.mark.sweep
def test_processes_go_on_as_one(ranks4: Ranks, tmp_path: Path) -> None:
    expected = whole(Run().on(0, 3).model)
    for found in ranks4(_goes_on, str(tmp_path / "at")):
        assert all(map(torch.equal, found, expected))


def test_another_number_of_stages_goes_on_with_it(tmp_path: Path) -> None:
    """By the names of parameters: as a step does that is moved there."""
    moved = Run().on(0, 2).save(tmp_path / "at")
    before = moved.means()
    flow.nn.pipeline(moved.model, ranks(1), CORRECTED)
    moved.step.move()
    moved.step.step_for(*numbers(12)).prepare()
    assert all(map(torch.equal, moved.means(), before))  # type: ignore[arg-type]
    loaded = Run(1).load(tmp_path / "at")
    assert loaded.on(2, 4).equals(moved.on(2, 4))
    assert all(map(torch.equal, moved.means(), loaded.means()))  # type: ignore[arg-type]


def test_steps_for_batches_of_other_sizes_share_it(tmp_path: Path) -> None:
    run, other = Run().on(0, 2).save(tmp_path / "at"), Run().load(tmp_path / "at")
    for each in (run, other):
        each.step(*numbers(24))
    assert run.equals(other)


def test_a_step_without_corrections_forgets_it(tmp_path: Path) -> None:
    """It would be of updates long ago, when a corrected step comes again."""
    Run().on(0, 2).save(tmp_path / "at")
    other = Run(schedule="1f1b").load(tmp_path / "at")
    assert all(x is not None for x in other.means())  # nobody has trained yet: saved again, it is still there
    other.on(2, 3).save(tmp_path / "then")
    assert other.means() == [None] * 4
    assert Run().load(tmp_path / "then").means() == [None] * 4


def test_a_frozen_layer_has_none() -> None:
    run = Run().on(0, 1)
    frozen = run.model[1]
    assert isinstance(frozen, nn.Module)
    frozen.requires_grad_(False)
    run.on(1, 2)
    assert [x is None for x in run.means()] == [False, False, True, True]
    frozen.requires_grad_(True)
    assert run.on(2, 3).means()[2] is not None


def test_a_model_on_meta_gets_it_with_its_first_step(tmp_path: Path) -> None:
    unbroken = Run().on(0, 2).save(tmp_path / "at").on(2, 3)
    other = object.__new__(Run)
    with torch.device("meta"):
        other.__init__()  # type: ignore[misc]
    assert other.load(tmp_path / "at").on(2, 3).equals(unbroken)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_the_account_of_memory_has_it(kind: Any, dtype: torch.dtype) -> None:
    """It was in no account, though it is as large as the weights, or twice: it is of float32 at least."""
    told = []
    for schedule in ("pipemare", CORRECTED):
        model = layers(2).float()
        flow.nn.pipeline(model, ranks(2), schedule)
        flow.nn.cast(model, {"*": dtype})
        optimizer = kind(model.parameters(), lr=0.02)
        step: Any = flow.compile(model, squares, optimizer, micro_batches=6, schedule=schedule)
        x, y = numbers(12)
        step(x.to(dtype), y.to(dtype))
        held, rests = step.explain().memory.ranks, step.memory_at_rest()
        assert {rank: of.states for rank, of in held.items()} == {rank: of.states for rank, of in rests.items()}
        told.append(held)
    means = 8 * 9 * max(dtype.itemsize, 4)
    assert [told[1][rank].states - told[0][rank].states for rank in (0, 1)] == [means, means]
    assert all(told[1][rank].total >= told[0][rank].total + means for rank in (0, 1))


def test_a_plain_step_looks_for_it_only_where_some_was_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def look(*given: Any) -> Any:
        asked.append(0)
        return means_of_step(*given)

    monkeypatch.setattr(adopted_model, "means_of_step", look)
    model = layers(2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = flow.compile(model, squares, optimizer, placement=flow.placement("cpu:[0-1]"))
    for at in range(3):
        step(*numbers(12, at))
    assert len(asked) == 1
    Run().on(0, 1).save(tmp_path / "at")  # others' are looked at once, and are none of its own
    for at in range(2):
        step(*numbers(12, at))
    assert len(asked) == 3
    flow.load(tmp_path / "at", model, optimizer=optimizer)
    assert all(late_mean(x) is not None for x in model.parameters())
    step(*numbers(12))
    assert all(late_mean(x) is None for x in model.parameters())
    assert len(asked) == 4
