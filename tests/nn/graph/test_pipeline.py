"""Steps in a pipeline, every rank in one process: what they compute is what one device computes, in any schedule."""

import copy
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors.schedules.published import PUBLISHED
from sbpflow.actors.schedules.schedule import Schedule
from sbpflow.nn.graph.instructions.instruction import Instruction
from sbpflow.nn.graph.instructions.moves import StartMove
from sbpflow.nn.graph.instructions.overlap import overlapped
from sbpflow.nn.graph.lower.registers import Transfer
from sbpflow.nn.graph.run import variant
from sbpflow.placement.errors import ScheduleError
from tests.grids import with_all_pairs
from tests.ranks import Ranks

from .pipes import (
    ALONE2,
    ALONE4,
    F32,
    F64,
    PAIRS,
    SYNCHRONOUS,
    Gpt,
    adamw,
    close,
    hinted,
    line,
    mlp,
    numbers,
    of,
    often,
    same_weights,
    sgd,
    square_loss,
    staged,
    text,
    trains,
    words_loss,
)

STAGES = {"2": ALONE2, "4": ALONE4, "pairs": PAIRS}


def fits(schedule: str, stages: str) -> bool:
    """Four layers are two chunks on each of two stages, and one on each of four."""
    return PUBLISHED[schedule].v == 1 or stages != "4"


WAYS = [("2", "alone"), ("4", "alone"), *(("pairs", way) for way in ("tensor", "data", "zero"))]
GRID = with_all_pairs(
    (kind, schedule, stages, way, dtype)
    for kind, schedule, (stages, way), dtype in product(["gpt", "llama"], SYNCHRONOUS, WAYS, [F64, F32])
    if fits(schedule, stages)
)
SAMPLE = [
    ("gpt", "1f1b", "4", "alone", F64),
    ("gpt", "zb_h1", "pairs", "zero", F64),
    ("gpt", "interleaved", "pairs", "tensor", F32),
    ("llama", "zb_v", "2", "alone", F64),
    *random.Random(5).sample(GRID, 2),
]


def learns(kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype) -> None:
    model = hinted(staged(of(kind, dtype), STAGES[stages], schedule), way)
    # Llama itself goes through float32 in norms and in the loss.
    tolerance = 1e-10 if dtype == F64 and kind == "gpt" else 1e-5
    # What rounding does to a gradient of nothing, AdamW makes a step of.
    make = adamw if dtype == F64 else sgd
    with flow.use_cluster("flat"):
        trains(model, words_loss, text, make=make, schedule=schedule, steps=10, tolerance=tolerance)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "schedule", "stages", "way", "dtype"), SAMPLE)
def test_a_model_learns_as_on_one_device(kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype) -> None:
    learns(kind, schedule, stages, way, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "schedule", "stages", "way", "dtype"), GRID)
def test_models_learn_under_every_schedule(kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype) -> None:
    learns(kind, schedule, stages, way, dtype)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_schedule_trains(schedule: str) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_runs_by_autograd(schedule: str) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule, backend="autograd")


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_runs_by_inductor(schedule: str) -> None:
    from torch._inductor import config

    with config.patch(compile_threads=1):  # else it leaves threads running
        trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule, backend="inductor")


# Ways through the stages.


class Layers(nn.Module):
    """Four layers that a function runs, each on a stage of its own."""

    def __init__(self, run: Any, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.double()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*self.layers, *args, **kwargs)


def on(run: Any, stages: Any = ALONE4) -> Layers:
    model = Layers(run)
    for layer, place in zip(model.layers, stages, strict=True):
        flow.nn.place(layer, place)
    return model


def straight(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    return d(torch.tanh(c(torch.tanh(b(torch.tanh(a(x)))))))  # type: ignore[no-any-return]


def around_one(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    first = torch.tanh(a(x))
    second = torch.tanh(b(first))
    return d(c(second) + first)  # type: ignore[no-any-return]


def to_the_end(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    first = torch.tanh(a(x))
    return d(c(torch.tanh(b(first)))) + d(first)  # type: ignore[no-any-return]


def to_all(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    first = torch.tanh(a(x))
    second = torch.tanh(b(first))
    third = torch.tanh(c(first + second))
    return d(first * second + third)  # type: ignore[no-any-return]


def two_edges(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    y, z = torch.split(torch.tanh(a(x)), [2, 4], -1)
    y, z = b(torch.cat([z, y], -1)), b(torch.cat([y, y, y], -1)).sin()
    return d(c(y) * c(z))  # type: ignore[no-any-return]


def inputs_anywhere(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    return d(c(b(torch.tanh(a(x)) * x) + x.sin()) - x.abs())  # type: ignore[no-any-return]


def unused_part(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    y = b(a(x))
    return d(c(y.detach()) + a(x))  # type: ignore[no-any-return]


RUNS = [straight, around_one, to_the_end, to_all, two_edges, inputs_anywhere, unused_part]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", often(["zb_h1"], ["1f1b", "gpipe_lifo"]))
@pytest.mark.parametrize("run", RUNS)
def test_values_go_from_any_stage_to_any_later_one(run: Any, schedule: str) -> None:
    trains(on(run), schedule=schedule)


@pytest.mark.parametrize("run", often(RUNS[2:4], [*RUNS[:2], *RUNS[4:]]))
def test_values_go_there_and_back_to_a_group(run: Any) -> None:
    trains(on(run, [ALONE2[0], ALONE2[1], ALONE2[0], ALONE2[1]]), schedule="interleaved")


@pytest.mark.parametrize("schedule", often(["zb_h1"], ["1f1b", "gpipe", "interleaved"]))
def test_a_weight_is_on_two_stages(schedule: str) -> None:
    torch.manual_seed(1)
    model = Gpt(tied=True).double()
    trains(staged(model, ALONE2, schedule), words_loss, text, schedule=schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_a_layer_is_used_on_two_stages(schedule: str) -> None:
    model = mlp(3)
    model.double()
    model.insert(2, model[0])
    one = copy.deepcopy(model)
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1], ALONE2[1])
    flow.nn.place(model[3], ALONE2[1])
    trains(model, one=one, schedule=schedule)


class OneMore(nn.Module):
    """A scale that is kept as its distance from one, as some norms do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, dtype=F64))

    def forward(self, x: Tensor | None = None) -> Tensor:
        scale = self.weight + 1
        return scale if x is None else x * scale


def test_what_is_made_of_weights_alone_is_made_where_it_is_used() -> None:
    model = nn.Sequential(*mlp(2).double(), OneMore(), nn.Linear(6, 6, dtype=F64))
    flow.nn.place(model[0], PAIRS[0])
    flow.nn.place(model[1], PAIRS[1])
    flow.nn.shard(model, {"3": S(0)})
    step = trains(model)
    assert step.plan_for(*numbers(0)).physical.layout("2.weight").placement == PAIRS[1]


class Lent(nn.Module):
    """Layers of which the second takes what the first makes of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second, self.last = OneMore(), *mlp(2).double(), nn.Linear(6, 6, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale()
        return self.last(F.layer_norm(self.second(self.first(x)), (6,), scale))  # type: ignore[no-any-return]


def test_what_another_stage_makes_of_weights_is_not_gathered_again_by_those_who_read_it() -> None:
    model = Lent()
    flow.nn.place([model.scale, model.first], PAIRS[0])
    flow.nn.place([model.second, model.last], PAIRS[1])
    flow.nn.shard(model, {"scale": S(0), "last": S(0)})
    trains(model)


UNEVEN = {
    "1 to 3": line(0, (1, 2, 3)),
    "2 to 4": line((0, 1), (2, 3, 4, 5)),
    "4 to 1": line((0, 1, 2, 3), 4),
    "grid to line": [flow.placement("cpu", [[0, 1], [2, 3]]), *line((4, 5, 6, 7))],
    "line to grid": [*line((4, 5)), flow.placement("cpu", [[0, 1], [2, 3]])],
}


WHERE = [(stages, way) for stages in UNEVEN for way in ("alone", "data", "zero", "tensor")]
USUAL = [("1 to 3", "data"), ("2 to 4", "alone"), ("grid to line", "zero"), ("line to grid", "tensor")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("stages", "way"), often(USUAL, [one for one in WHERE if one not in USUAL]))
def test_stages_have_different_ranks(stages: str, way: str) -> None:
    with flow.use_cluster("flat"):
        model = hinted(staged(of("gpt"), UNEVEN[stages]), way)
        if "grid" in stages and way in ("tensor", "zero"):
            flow.nn.shard(model, {"*": None})
            blocks = list(model.get_submodule("blocks").children())
            for block in blocks[:2] if stages.startswith("grid") else blocks[2:]:
                flow.nn.shard(
                    block, {"qkv": (B, S(0)), "out.weight": (B, S(1))} if way == "tensor" else {"*": (S(0), S(0))}
                )
        trains(model, words_loss, text)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_of_different_cost_are_stages_of_different_size(schedule: str) -> None:
    model = mlp(7)
    model.double()
    flow.nn.place(model[:1], ALONE2[0])
    flow.nn.place(model[1:], ALONE2[1])
    trains(model, schedule=schedule)


# Micro-batches.


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("rows", "micro_batches"),
    [(8, 1), (8, 2), (8, 8), (5, 4), (13, 4), (7, 3), (3, 2), (4, 4), (9, 5)],
)
@pytest.mark.parametrize("schedule", often(["1f1b"], ["zb_h1"]))
def test_any_number_of_micro_batches_is_the_batch(schedule: str, rows: int, micro_batches: int) -> None:
    trains(
        staged(mlp().double(), ALONE4, schedule),
        batches=lambda at: numbers(at, rows),
        schedule=schedule,
        micro_batches=micro_batches,
    )


def test_batches_of_several_sizes_go_through_one_graph() -> None:
    trains(staged(mlp().double(), ALONE2), batches=lambda at: numbers(at, [8, 5, 9, 8][at]), steps=4)


# Training otherwise.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [ALONE4, PAIRS], ids=["alone", "pairs"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_are_clipped_over_all_stages(schedule: str, stages: Any) -> None:
    trains(staged(mlp().double(), stages, schedule), schedule=schedule, clip_grad_norm=0.01)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [sgd, adamw, None], ids=["sgd", "adamw", "no optimizer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved"])
def test_an_optimizer_or_none(schedule: str, make: Any) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule, make=make)


@pytest.mark.parametrize("schedule", often(["zb_h1"], ["1f1b"]))
@pytest.mark.parametrize("frozen", often([[0, 1], [3]], [[0], [1, 2], [0, 1, 2]]))
def test_frozen_layers_stay(schedule: str, frozen: list[int]) -> None:
    model = mlp().double()
    for number in frozen:
        model[number].requires_grad_(False)
    trains(staged(model, ALONE4, schedule), schedule=schedule)


def test_mixed_precision() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    trains(staged(mlp(), ALONE2), loss, lambda at: numbers(at, dtype=F32), make=sgd, schedule="zb_h1", tolerance=2e-3)


def test_mixed_precision_around_the_step() -> None:
    torch.manual_seed(0)
    model = staged(of("gpt", F32), ALONE2)
    with torch.autocast("cpu", torch.bfloat16):
        trains(model, words_loss, text, make=sgd, tolerance=1e-2)


def test_own_marks() -> None:
    mine = Schedule("mine", act="p-s+1", split=True, stash="p+1")
    trains(staged(mlp().double(), ALONE2, mine), schedule=mine)


def test_own_marks_as_text() -> None:
    trains(staged(mlp().double(), ALONE4), schedule="schedule mine\nact p-s\nlow_b p-s-1\n")


def test_own_table() -> None:
    table = Schedule("pair", table=("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"))
    trains(staged(mlp().double(), ALONE2), schedule=table, micro_batches=3, batches=lambda at: numbers(at, 7))
    trains(staged(mlp().double(), ALONE2), schedule=str(table), micro_batches=3)


def test_own_table_with_weights_apart() -> None:
    table = Schedule("apart", table=("F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"))
    trains(staged(mlp().double(), ALONE2), schedule=table, micro_batches=2)


def test_own_table_of_chunks_that_share_ranks() -> None:
    """Two chunks a device: F and B are of its first, f and b of its second."""
    rows = "F0 F1 f0 f1 b0 B0 b1 B1", "F0 F1 f0 b0 f1 b1 B0 B1"
    table = Schedule("two", table=rows)
    trains(staged(mlp().double(), [*ALONE2, *ALONE2]), schedule=table, micro_batches=2)
    with pytest.raises(ScheduleError, match=r"two wants 4 chunks .*\n.*there are 4"):  # there and back, not in turn
        trains(staged(mlp().double(), [*ALONE2, *ALONE2[::-1]]), schedule=table, micro_batches=2)
    four = Schedule("four", table=("F0 F1 B0 B1",) * 4)  # of which two at a time would be on one device
    with pytest.raises(ScheduleError, match="a table for p=4"):
        trains(staged(mlp().double(), [*ALONE2, *ALONE2]), schedule=four, micro_batches=2)


def test_a_graph_of_ones_own() -> None:
    class Step(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__(micro_batches=4, schedule="zb_h1")
            self.model = staged(mlp().double(), ALONE2, "zb_h1")
            self.optimizer = adamw(self.model)

        def build(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            loss = square_loss(self.model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss, loss.detach() * 2

    torch.manual_seed(0)
    step = Step()
    torch.manual_seed(0)
    one = mlp().double()
    ones = adamw(one)
    for at in range(3):
        wanted = square_loss(one, *numbers(at))
        wanted.backward()  # type: ignore[no-untyped-call]
        ones.step()
        ones.zero_grad()
        close(step(*numbers(at)), [wanted, wanted * 2], 1e-10)
    same_weights(step.model, one, 1e-10)


def test_two_losses_go_backward() -> None:
    class Step(flow.nn.Graph):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(micro_batches=4)
            self.model = model

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.model(x)
            one, two = F.mse_loss(out, y), out.abs().sum()
            torch.autograd.backward([one, two])
            return one

    model = staged(mlp().double(), ALONE2)
    plain = copy.deepcopy(model)
    step = Step(model)
    step(*numbers(0))
    out = plain(numbers(0)[0])
    (F.mse_loss(out, numbers(0)[1]) + out.abs().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad, 1e-10)


def test_gradients_add_up_without_an_optimizer() -> None:
    model = staged(mlp().double(), ALONE2)
    one = copy.deepcopy(model)
    step = flow.compile(model, square_loss, micro_batches=4)
    for at in range(3):
        square_loss(one, *numbers(at)).backward()  # type: ignore[no-untyped-call]
        step(*numbers(at))
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.grad, q.grad, 1e-10)


def test_dropout_is_the_same_in_every_schedule() -> None:
    def losses(schedule: str, stages: Any) -> list[float]:
        torch.manual_seed(2)
        model = nn.Sequential(mlp(1), nn.Dropout(0.3), mlp(1), nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 6))).double()
        staged(model, stages, schedule)
        step = flow.compile(model, square_loss, adamw(model), micro_batches=4, schedule=schedule)
        torch.manual_seed(7)
        return [step(*numbers(at)).item() for at in range(3)]

    wanted = losses("gpipe", ALONE4)
    assert len(set(wanted)) == 3
    for schedule, stages in (("1f1b", ALONE4), ("zb_h1", ALONE2), ("1f1b", PAIRS)):
        assert losses(schedule, stages) == pytest.approx(wanted, rel=1e-10)


def beside(schedule: str) -> None:
    """On cards and between hosts; here ranks of one host would carry their moves themselves."""
    started: list[Instruction] = []

    def watched(todo: Sequence[Instruction], transfers: Sequence[Transfer]) -> list[Instruction]:
        made = overlapped(todo, transfers)
        started.extend(do for do in made if isinstance(do, StartMove))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "pays", True)
        patch.setattr(variant, "overlapped", watched)
        trains(hinted(staged(of("gpt"), PAIRS, schedule), "zero"), words_loss, text, schedule=schedule)
    assert started


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_weights_are_gathered_beside_the_work(schedule: str) -> None:
    beside(schedule)


def test_ranks_gather_weights_beside_the_work(ranks4: Ranks) -> None:
    ranks4(beside, "zb_h1")
