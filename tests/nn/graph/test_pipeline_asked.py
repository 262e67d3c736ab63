"""A pipeline that is asked for wrongly says so; and what it keeps alive is what its schedule has slots for."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sbpflow as flow
from sbpflow.actors.schedules.published import PUBLISHED
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.placement.errors import SbpError, ScheduleError

from .pipes import (
    ALONE2,
    ALONE4,
    F64,
    SYNCHRONOUS,
    WORDS,
    adamw,
    close,
    line,
    mlp,
    numbers,
    of,
    same_weights,
    see_bundles,
    sgd,
    square_loss,
    staged,
    text,
    trains,
    words_loss,
)

# What is asked wrongly.


def asked(
    loss: Any = square_loss, micro_batches: Any = 4, schedule: Any = "1f1b", model: nn.Module | None = None
) -> flow.nn.Graph:
    model = model or staged(mlp().double(), ALONE2)
    return flow.compile(model, loss, adamw(model), micro_batches=micro_batches, schedule=schedule)


@pytest.mark.parametrize("micro_batches", [0, -1, 1.5, "4", None])
def test_micro_batches_are_a_number(micro_batches: Any) -> None:
    with pytest.raises(SbpError, match=r"micro_batches=.*\n  .*as in 8"):
        asked(micro_batches=micro_batches)


def test_there_are_no_more_micro_batches_than_samples() -> None:
    with pytest.raises(SbpError, match=r"9 micro-batches.* batch of 8\n  .*micro_batches=8"):
        asked(micro_batches=9)(*numbers(0))


@pytest.mark.parametrize("args", [(), (3,), (torch.tensor(2.0),)])
def test_there_is_something_to_cut(args: Any) -> None:
    def loss(model: nn.Module, *given: Any) -> Tensor:
        return model(torch.ones(8, 6, dtype=F64)).mean()  # type: ignore[no-any-return]

    with pytest.raises(SbpError, match="no tensor to cut"):
        asked(loss)(*args)


WRONG = [
    ("1f2b", "no schedule is called"),
    (3, "schedule=3"),
    ("schedule x\nact p-q\n", "has no q"),
    ("1f1b please", "begins"),
]


@pytest.mark.parametrize(("schedule", "text"), WRONG)
def test_a_schedule_is_known(schedule: Any, text: str) -> None:
    with pytest.raises((SbpError, ScheduleError), match=text):
        asked(schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("zb_v", ALONE2), ("v_min", ALONE4), (Schedule("pair", table=("F0 B0", "F0 B0")), ALONE2)]
)
def test_a_schedule_fits_the_stages(schedule: Any, stages: Any) -> None:
    with pytest.raises(ScheduleError, match=r"\n  "):
        asked(schedule=schedule, model=staged(mlp().double(), stages))(*numbers(0))


def test_a_schedule_of_other_chunks_says_how_layers_are_to_be_placed() -> None:
    model = staged(mlp().double(), [ALONE2[0], ALONE2[1], ALONE2[1], ALONE2[0]])
    with pytest.raises(ScheduleError, match=r"breadth_first wants .*\n.*there are 4.*\n.*flow.nn.place"):
        asked(schedule="breadth_first", model=model)(*numbers(0))


def norms() -> nn.Module:
    model = nn.Sequential(mlp(2), nn.BatchNorm1d(6), mlp(2)).double()
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1:], ALONE2[1])
    return model


def test_batch_norm_in_training_is_refused() -> None:
    with pytest.raises(SbpError, match="batch norm"):
        asked(model=norms())(*numbers(0))


@pytest.mark.parametrize("at", [0, 1])
def test_arguments_get_no_gradients(at: int) -> None:
    args = [x.requires_grad_(k == at) for k, x in enumerate(numbers(0))]
    with pytest.raises(SbpError, match=rf"the argument {at} requires grad, which"):
        asked()(*args)


def test_a_loss_is_one_number() -> None:
    with pytest.raises(SbpError, match="returned a tensor"):
        asked(lambda m, x, y: F.mse_loss(m(x), y, reduction="none").mean(1))(*numbers(0))


class Given(flow.nn.Graph):
    def __init__(self) -> None:
        super().__init__(micro_batches=4)
        self.model = staged(mlp().double(), ALONE2)

    def build(self, x: Tensor, y: Tensor) -> Tensor:
        loss = square_loss(self.model, x, y)
        loss.backward(torch.full_like(loss, 2.0))  # type: ignore[no-untyped-call]
        return loss


def test_a_gradient_of_the_loss_is_refused() -> None:
    with pytest.raises(SbpError, match="was given a gradient"):
        Given()(*numbers(0))


class Buffered(nn.Module):
    """A buffer that its forward changes."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.seen: Tensor
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0) if self.mean else 1
        return x


@pytest.mark.parametrize("mean", [False, True])
def test_a_buffer_changes_once_a_step_or_not_at_all(mean: bool) -> None:
    model = nn.Sequential(mlp(1), Buffered(mean), mlp(1)).double()
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1:], ALONE2[1])
    if not mean:
        trains(model)
        return
    with pytest.raises(SbpError, match=r"the buffer 1\.seen is changed by what one micro-batch holds"):
        asked(model=model)(*numbers(0))


def test_an_error_in_a_stage_names_the_actor_and_the_next_step_works() -> None:
    model = staged(of("gpt"), ALONE2)
    one = copy.deepcopy(model)
    step = flow.compile(model, words_loss, adamw(model), micro_batches=4)
    (wrong,) = text(0)
    wrong[5, 2] = WORDS
    for _ in range(2):
        with pytest.raises(IndexError) as error:
            step(wrong)
        assert "in actor F0, micro-batch 2, on queue device 0" in "".join(error.value.__notes__)
    same_weights(model, one, 0)
    close(step(*text(1)), words_loss(one, *text(1)), 1e-10)


# Memory.


def held(schedule: str, monkeypatch: pytest.MonkeyPatch, stages: int = 4, m: int = 8) -> dict[str, int]:
    """The most that ever lay in the registers of activations: bundles of which all tensors were alive."""
    most: dict[str, int] = {}
    alive: dict[str, list[list[weakref.ref[Tensor]]]] = {}

    def see(name: str, bundle: Any) -> None:
        if name.startswith(("act.", "stash.")):
            kept = alive.setdefault(name, [])
            kept.append([weakref.ref(x) for x in tree_leaves(bundle) if isinstance(x, Tensor)])
            now = sum(all(x() is not None for x in each) for each in kept)
            most[name] = max(most.get(name, 0), now)

    see_bundles(monkeypatch, see)
    model = staged(mlp(4 * stages).double(), line(*range(stages)), schedule)
    step = flow.compile(model, square_loss, adamw(model), micro_batches=m, schedule=schedule)
    step(*numbers(0, m))
    return most


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("1f1b", {"act.0": 4, "act.1": 3, "act.2": 2, "act.3": 1}),
        ("gpipe_lifo", {"act.0": 8, "act.1": 8, "act.2": 8, "act.3": 8}),
        ("zb_h1", {"act.0": 4, "act.1": 3, "act.2": 2, "act.3": 1, "stash.0": 4}),
    ],
)
def test_live_activations_are_the_slots_of_the_schedule(
    schedule: str, wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = held(schedule, monkeypatch)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_live_activations_are_never_more_than_slots(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = 4 if PUBLISHED[schedule].v == 1 else 2
    plan = PUBLISHED[schedule]
    for name, count in held(schedule, monkeypatch, stages).items():
        kind, chunk = name.split(".")
        marks = plan.marks(plan.shape(stages, 8), int(chunk))
        assert 0 < count <= (marks.act if kind == "act" else marks.stash), name


def test_results_that_are_arguments_or_weights() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        return [F.mse_loss(model(x), y), y, model[0][0].weight]  # type: ignore[index]

    trains(staged(mlp().double(), ALONE2), loss, make=None, steps=1)


def said(schedule: str, micro_batches: int) -> list[int]:
    """Bytes of activations of each rank, for micro-batches of 64 samples, as `explain` says."""
    model = staged(mlp(8, 256).double(), ALONE2, schedule)
    step = flow.compile(model, square_loss, sgd(model), micro_batches=micro_batches, schedule=schedule)
    step(*numbers(0, 64 * micro_batches, 256))
    memory = step.explain().memory
    assert memory is not None
    return [memory.ranks[rank].activations for rank in (0, 1)]


def test_every_micro_batch_under_way_is_said_to_keep_what_its_backward_reads() -> None:
    """Of GPipe each; of 1F1B as many as there are stages from here on, however many follow."""
    four, five, seven = (said("gpipe", m) for m in (4, 5, 7))
    each = [b - a for a, b in zip(four, five, strict=True)]
    assert [b - a for a, b in zip(five, seven, strict=True)] == [2 * bytes_ for bytes_ in each]
    one = 64 * 256 * 8  # an activation: a stage has four linear layers, each behind what it reads, and four tanh
    assert all(4 * one <= bytes_ <= 8 * one for bytes_ in each)
    early = said("1f1b", 4)
    first, last = said("1f1b", 7)
    assert early == [first, last - 3 * 8]  # a loss of each micro-batch stays where it is made
    # Of GPipe's four the first has ended when there are sums of gradients, and 1F1B has two and one then. GPipe has one
    # more gradient that came and waits; 1F1B has two receives of later micro-batches posted ahead.
    assert [a - b for a, b in zip(four, early, strict=True)] == [each[0] + one, 2 * (each[1] - 8) - 2 * one]
