"""Steps in a pipeline on real ranks, each of which runs the actors of its own stage."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors.schedules.published import PUBLISHED
from sbpflow.sbp.trial import one_thread
from tests.grids import with_all_pairs
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
    whole,
    words_loss,
)
from .test_pipeline import RUNS, on
from .test_pipeline_losses import LOSSES, Weighted, labelled

STAGES = {"2": ALONE2, "4": ALONE4, "pairs": PAIRS, "1 to 3": line(0, (1, 2, 3)), "3 to 1": line((0, 1, 2), 3)}

WAYS = [("2", "alone"), ("4", "alone"), *(("pairs", way) for way in ("tensor", "data", "zero"))]
GRID = with_all_pairs(
    (kind, schedule, stages, way)
    for kind, schedule, (stages, way) in product(["gpt", "llama"], SYNCHRONOUS, WAYS)
    if PUBLISHED[schedule].v == 1 or stages != "4"
)


def learn(kind: str, schedule: str, stages: str, way: str, steps: int) -> None:
    model = hinted(staged(of(kind), STAGES[stages], schedule), way)
    with flow.use_cluster("flat"):
        tolerance = 1e-10 if kind == "gpt" else 1e-5  # Llama goes through float32 in norms and in the loss
        trains(model, words_loss, text, schedule=schedule, steps=steps, tolerance=tolerance)


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "stages"),
    [(name, stages) for name in SYNCHRONOUS for stages in STAGES if PUBLISHED[name].v == 1 or stages != "4"],
)
def test_every_schedule_trains(ranks4: Ranks, schedule: str, stages: str) -> None:
    ranks4(small, schedule, stages)


def runs(at: int, schedule: str) -> None:
    trains(on(RUNS[at]), schedule=schedule)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["zb_h1", "1f1b"])
@pytest.mark.parametrize("at", range(len(RUNS)), ids=[run.__name__ for run in RUNS])
def test_values_go_from_any_stage_to_any_later_one(ranks4: Ranks, at: int, schedule: str) -> None:
    ranks4(runs, at, schedule)


def sized(rows: int, micro_batches: int) -> None:
    trains(staged(mlp().double(), ALONE4), batches=lambda at: numbers(at, rows), micro_batches=micro_batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "micro_batches"), [(8, 1), (8, 2), (8, 8), (5, 4), (7, 3)])
def test_any_number_of_micro_batches_is_the_batch(ranks4: Ranks, rows: int, micro_batches: int) -> None:
    ranks4(sized, rows, micro_batches)


def lost(name: str) -> None:
    trains(staged(Weighted(), ALONE2), LOSSES[name], lambda at: labelled(at, 9))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ignored", "weights", "sum", "masked", "decayed"])
def test_a_loss_is_that_of_the_batch(ranks4: Ranks, name: str) -> None:
    ranks4(lost, name)


def the_rest() -> None:
    trains(staged(mlp().double(), ALONE4), clip_grad_norm=0.01, make=sgd)
    trains(staged(mlp().double(), ALONE4), make=None)
    model, (x, _) = mlp().double(), numbers(0)
    wanted = model(x)
    with torch.no_grad():
        close(flow.compile(staged(model, ALONE4), micro_batches=4)(x), wanted, 1e-10)


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


def sent_home(schedule: str, hints: dict[str, Any]) -> tuple[list[str], list[int]]:
    """The moves by which gradients came home here in a step, and how many gradients are in each bucket of the graph."""
    model = hinted(staged(mlp(8 if schedule == "interleaved" else 4, 16).double(), PAIRS, schedule), "alone")
    flow.nn.shard(model, hints)
    with flow.use_cluster("flat"):
        step: Any = flow.compile(model, square_loss, sgd(model), micro_batches=4, schedule=schedule)
        batch = numbers(0, 2048, 16)  # so many rows that each stage is data parallel
        step(*batch)
        with flow.record() as moves:
            step(*batch)
    held = Counter(back.bucket for back in step.planned.graph.backs if back.bucket is not None)
    return [f"{m.op} {m.boxing.moves[0].kind}" for m in moves if m.op == "bucket" or m.op.startswith("d ")], [
        *held.values()
    ]


@pytest.mark.parametrize("schedule", often(["interleaved", "pipedream"], ["1f1b", "zb_h1"]))
def test_gradients_of_data_parallel_stages_come_home_in_one_message(ranks4: Ranks, schedule: str) -> None:
    """One reduction for each stage and step, though the weights of a data parallel stage are seen in another way."""
    found = ranks4(sent_home, schedule, {"*": B})
    many = 4 if schedule == "pipedream" else 1  # updates of a step, each with its reduction
    assert [moves for moves, _ in found] == [["bucket all_reduce"] * many] * 4
    assert found[0][1] == [8, 8] if schedule == "interleaved" else [4, 4]


def test_gradients_that_move_with_every_micro_batch_are_in_no_bucket(ranks4: Ranks) -> None:
    moves, held = ranks4(sent_home, "1f1b", {"*": S(0)})[0]
    assert held == []
    assert len(moves) == 4 * 4
    assert all(move.endswith("reduce_scatter") for move in moves)


def test_chunks_of_one_placement_that_update_by_themselves_have_buckets_of_their_own() -> None:
    """Layers on A, B, A, B are four chunks, of which each has its optimizer's step when its own gradients are there."""

    def trained(first: flow.Placement, second: flow.Placement) -> tuple[Any, list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = mlp(4, 16).double()
        for layer, place in zip(model, (first, second, first, second), strict=True):
            flow.nn.place(layer, place)
        flow.nn.shard(model, {"*": B})
        with flow.use_cluster("flat"), one_thread():
            step: Any = flow.compile(model, square_loss, sgd(model), micro_batches=4, schedule="pipedream")
            with flow.record() as moves:
                for at in range(2):
                    step(*numbers(at, 2048, 16))
        return step, [whole(p) for p in model.parameters()], sum(move.op == "bucket" for move in moves)

    _, alone, none = trained(*ALONE2)
    step, pairs, moves = trained(*PAIRS)
    buckets: dict[int, set[str]] = {}
    for back in step.planned.graph.backs:
        if back.bucket is not None:
            buckets.setdefault(back.bucket, set()).add(back.into.partition(".")[0])
    assert len(buckets) >= 3
    assert all(len(layers) == 1 for layers in buckets.values())
    assert (none, moves) == (0, 2 * 4 * len(buckets))  # steps, and updates of each
    torch.testing.assert_close(pairs, alone, rtol=1e-10, atol=1e-12)
