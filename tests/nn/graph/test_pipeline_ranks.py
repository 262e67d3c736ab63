"""Steps in a pipeline on real ranks, each of which runs the actors of its own stage."""

from itertools import product
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from sbpflow.actors.published import PUBLISHED
from tests.ranks import Ranks

from .pipes import (
    ALONE2,
    ALONE4,
    PAIRS,
    SYNCHRONOUS,
    close,
    hinted,
    line,
    mlp,
    numbers,
    of,
    often,
    sgd,
    square_loss,
    staged,
    text,
    trains,
    words_loss,
)
from .test_pipeline import RUNS, on
from .test_pipeline_losses import LOSSES, Weighted, labelled

STAGES = {"2": ALONE2, "4": ALONE4, "pairs": PAIRS, "1 to 3": line(0, (1, 2, 3)), "3 to 1": line((0, 1, 2), 3)}

WAYS = [("2", "alone"), ("4", "alone"), *(("pairs", way) for way in ("tensor", "data", "zero"))]
GRID = [
    (kind, schedule, stages, way)
    for kind, schedule, (stages, way) in product(["gpt", "llama"], SYNCHRONOUS, WAYS)
    if PUBLISHED[schedule].v == 1 or stages != "4"
]


def learn(kind: str, schedule: str, stages: str, way: str, steps: int) -> None:
    model = hinted(staged(of(kind), STAGES[stages], schedule), way)
    with flow.use_cluster("flat"):
        tolerance = 1e-10 if kind == "gpt" else 1e-5  # Llama goes through float32 in norms and in the loss
        trains(model, words_loss, text, schedule=schedule, steps=steps, tolerance=tolerance)


@pytest.mark.parametrize(
    ("schedule", "stages", "way"),
    often([("1f1b", "4", "alone"), ("zb_h1", "pairs", "zero")], [("interleaved", "pairs", "tensor")]),
)
def test_ranks_learn_as_one_device(ranks4: Ranks, schedule: str, stages: str, way: str) -> None:
    ranks4(learn, "gpt", schedule, stages, way, 3)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "schedule", "stages", "way"), GRID)
def test_ranks_learn_under_every_schedule(ranks4: Ranks, kind: str, schedule: str, stages: str, way: str) -> None:
    ranks4(learn, kind, schedule, stages, way, 10, timeout=120.0)


def small(schedule: str, stages: str) -> None:
    trains(staged(mlp().double(), STAGES[stages], schedule), schedule=schedule)


def all_schedules(stages: str) -> None:
    for schedule in SYNCHRONOUS:
        if PUBLISHED[schedule].v == 1 or stages != "4":
            small(schedule, stages)


@pytest.mark.parametrize("stages", often(["pairs"], ["2", "4", "1 to 3", "3 to 1"]))
def test_every_schedule_trains(ranks4: Ranks, stages: str) -> None:
    ranks4(all_schedules, stages)


def all_runs(schedule: str) -> None:
    for run in RUNS:
        trains(on(run), schedule=schedule)


@pytest.mark.parametrize("schedule", often(["zb_h1"], ["1f1b"]))
def test_values_go_from_any_stage_to_any_later_one(ranks4: Ranks, schedule: str) -> None:
    ranks4(all_runs, schedule)


def all_sizes() -> None:
    for rows, micro_batches in [(8, 1), (8, 2), (8, 8), (5, 4), (7, 3)]:
        model = staged(mlp().double(), ALONE4)
        trains(model, batches=lambda at, n=rows: numbers(at, n), micro_batches=micro_batches)  # type: ignore[misc]


def test_any_number_of_micro_batches_is_the_batch(ranks4: Ranks) -> None:
    ranks4(all_sizes)


def some_losses() -> None:
    for name in ("ignored", "weights", "sum", "masked", "decayed"):
        trains(staged(Weighted(), ALONE2), LOSSES[name], lambda at: labelled(at, 9))


def test_a_loss_is_that_of_the_batch(ranks4: Ranks) -> None:
    ranks4(some_losses)


def the_rest() -> None:
    trains(staged(mlp().double(), ALONE4), clip_grad_norm=0.01, make=sgd)
    trains(staged(mlp().double(), ALONE4), make=None)
    model = staged(of("gpt"), ALONE4)
    with torch.no_grad():
        close(flow.compile(model, micro_batches=4)(*text(0)), of("gpt")(*text(0)), 1e-10)


def test_clipping_no_optimizer_and_inference(ranks4: Ranks) -> None:
    ranks4(the_rest)


def recorded() -> None:
    model = staged(mlp().double(), STAGES["1 to 3"])
    step = flow.compile(model, square_loss, micro_batches=4)
    step(*numbers(0))
    with flow.record() as moves:
        step(*numbers(1))
    hops = [move for move in moves if move.op == "hop"]
    assert len(hops) == 2 * 4  # each micro-batch there and back
    assert all(Path(move.line.rpartition(":")[0]).name == "test_pipeline_ranks.py" for move in moves), str(moves)


def test_a_record_has_the_hops_between_ranks(ranks4: Ranks) -> None:
    ranks4(recorded)
