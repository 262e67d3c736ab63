"""Steps in a pipeline, every rank in one process: what they compute is what one device computes, in any schedule."""

import copy
import random
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sbpflow as flow
from sbpflow import B, S
from sbpflow.actors.network import Actor
from sbpflow.actors.published import PUBLISHED
from sbpflow.actors.schedule import Schedule
from sbpflow.nn.graph.pipelined import Pipelined
from sbpflow.placement.errors import SbpError, ScheduleError

from .pipes import (
    ALONE2,
    ALONE4,
    F32,
    F64,
    PAIRS,
    SYNCHRONOUS,
    WIDTH,
    WORDS,
    Gpt,
    adamw,
    close,
    hinted,
    line,
    mlp,
    numbers,
    of,
    same_weights,
    sgd,
    square_loss,
    staged,
    text,
    trains,
    whole,
    words_loss,
)

STAGES = {"2": ALONE2, "4": ALONE4, "pairs": PAIRS}


def fits(schedule: str, stages: str) -> bool:
    """Four layers are two chunks on each of two stages, and one on each of four."""
    return PUBLISHED[schedule].v == 1 or stages != "4"


WAYS = [("2", "alone"), ("4", "alone"), *(("pairs", way) for way in ("tensor", "data", "zero"))]
GRID = [
    (kind, schedule, stages, way, dtype)
    for kind, schedule, (stages, way), dtype in product(["gpt", "llama"], SYNCHRONOUS, WAYS, [F64, F32])
    if fits(schedule, stages)
]
SAMPLE = random.Random(5).sample(GRID, 8)


def learns(kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype) -> None:
    model = hinted(staged(of(kind, dtype), STAGES[stages], schedule), way)
    # Llama itself goes through float32 in norms and in the loss.
    tolerance = 1e-10 if dtype == F64 and kind == "gpt" else 1e-5
    # What rounding does to a gradient of nothing, AdamW makes a step of.
    make = adamw if dtype == F64 else sgd
    with flow.use_cluster("flat"):
        trains(model, words_loss, text, make=make, schedule=schedule, steps=10, tolerance=tolerance)


@pytest.mark.parametrize(("kind", "schedule", "stages", "way", "dtype"), SAMPLE)
def test_a_model_learns_as_on_one_device(
    kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype
) -> None:
    learns(kind, schedule, stages, way, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "schedule", "stages", "way", "dtype"), GRID)
def test_every_model_learns_under_every_schedule(
    kind: str, schedule: str, stages: str, way: str, dtype: torch.dtype
) -> None:
    learns(kind, schedule, stages, way, dtype)


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_every_schedule_trains(schedule: str) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule)


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
    y, z = torch.tanh(a(x)).split([2, 4], -1)
    y, z = b(torch.cat([z, y], -1)), b(torch.cat([y, y, y], -1)).sin()
    return d(c(y) * c(z))  # type: ignore[no-any-return]


def inputs_anywhere(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    return d(c(b(torch.tanh(a(x)) * x) + x.sin()) - x.abs())  # type: ignore[no-any-return]


def unused_part(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> Tensor:
    y = b(a(x))
    return d(c(y.detach()) + a(x))  # type: ignore[no-any-return]


RUNS = [straight, around_one, to_the_end, to_all, two_edges, inputs_anywhere, unused_part]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe_lifo"])
@pytest.mark.parametrize("run", RUNS)
def test_values_go_from_any_stage_to_any_later_one(run: Any, schedule: str) -> None:
    trains(on(run), schedule=schedule)


@pytest.mark.parametrize("run", RUNS)
def test_values_go_there_and_back_to_a_group(run: Any) -> None:
    trains(on(run, [ALONE2[0], ALONE2[1], ALONE2[0], ALONE2[1]]), schedule="interleaved")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe", "interleaved"])
def test_a_weight_is_on_two_stages(schedule: str) -> None:
    torch.manual_seed(1)
    model = Gpt(tied=True).double()
    trains(staged(model, ALONE2, schedule), words_loss, text, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_a_layer_is_used_on_two_stages(schedule: str) -> None:
    model = mlp(3).double()
    model.insert(2, model[0])
    one = copy.deepcopy(model)
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1], ALONE2[1])
    flow.nn.place(model[3], ALONE2[1])
    trains(model, one=one, schedule=schedule)


UNEVEN = {
    "1 to 3": line(0, (1, 2, 3)),
    "2 to 4": line((0, 1), (2, 3, 4, 5)),
    "4 to 1": line((0, 1, 2, 3), 4),
    "grid to line": [flow.placement("cpu", [[0, 1], [2, 3]]), *line((4, 5, 6, 7))],
    "line to grid": [*line((4, 5)), flow.placement("cpu", [[0, 1], [2, 3]])],
}


@pytest.mark.parametrize("way", ["alone", "data", "zero", "tensor"])
@pytest.mark.parametrize("stages", UNEVEN)
def test_stages_have_different_ranks(stages: str, way: str) -> None:
    with flow.use_cluster("flat"):
        model = hinted(staged(of("gpt"), UNEVEN[stages]), way)
        if "grid" in stages and way in ("tensor", "zero"):
            flow.nn.shard(model, {"*": None})
            grid = model.blocks[:2] if stages.startswith("grid") else model.blocks[2:]
            for block in grid:
                flow.nn.shard(block, {"qkv": (B, S(0)), "out.weight": (B, S(1))} if way == "tensor" else {"*": (S(0), S(0))})
        trains(model, words_loss, text)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_layers_of_different_cost_are_stages_of_different_size(schedule: str) -> None:
    model = mlp(7).double()
    flow.nn.place(list(model[:1]), ALONE2[0])
    flow.nn.place(list(model[1:]), ALONE2[1])
    trains(model, schedule=schedule)


# Micro-batches.


@pytest.mark.parametrize(
    ("rows", "micro_batches"),
    [(8, 1), (8, 2), (8, 8), (5, 4), (13, 4), (7, 3), (3, 2), (4, 4), (9, 5)],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_any_number_of_micro_batches_is_the_batch(schedule: str, rows: int, micro_batches: int) -> None:
    trains(
        staged(mlp().double(), ALONE4, schedule),
        batches=lambda at: numbers(at, rows),
        schedule=schedule,
        micro_batches=micro_batches,
    )


def test_batches_of_several_sizes_go_through_one_graph() -> None:
    trains(staged(mlp().double(), ALONE2), batches=lambda at: numbers(at, [8, 5, 9, 8][at]), steps=4)


# Losses.


def labelled(at: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Some labels do not count: of some micro-batches all, of others none."""
    draw = torch.Generator().manual_seed(at)
    x = torch.randn(rows, 6, dtype=F64, generator=draw)
    labels = torch.randint(6, (rows,), generator=draw)
    labels[:3] = -100
    labels[6] = -100
    return x, labels



class Weighted(nn.Sequential):
    """With a weight for each class."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.register_buffer("weights", torch.tensor([1.0, 0.5, 2.0, 3.0, 0.1, 1.5]))
        self.double()


LOSSES: dict[str, Any] = {
    "mean": lambda m, x, y: F.cross_entropy(m(x), y.clamp(min=0)),
    "sum": lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"),
    "ignored": lambda m, x, y: F.cross_entropy(m(x), y),
    "ignored, another number": lambda m, x, y: F.cross_entropy(m(x), y.clamp(min=0), ignore_index=0),
    "weights": lambda m, x, y: F.cross_entropy(m(x), y, weight=m.weights),
    "smoothed": lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1),
    "smoothed with weights": lambda m, x, y: F.cross_entropy(m(x), y, weight=m.weights, label_smoothing=0.1),
    "nll": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), -1), y),
    "none, then mean": lambda m, x, y: F.cross_entropy(m(x), y.clamp(min=0), reduction="none").mean(),
    "none, by counted": lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").sum() / (y >= 0).sum(),
    "masked": lambda m, x, y: (m(x).square().mean(-1) * (y >= 0)).sum() / (y >= 0).sum(),
    "masked, clamped": lambda m, x, y: (m(x).square().mean(-1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
    "mean of squares": lambda m, x, y: m(x).square().mean(),
    "sum of squares": lambda m, x, y: m(x).square().sum(),
    "times two": lambda m, x, y: 2 * m(x).square().mean() / 3,
    "sum by the number of rows": lambda m, x, y: m(x).square().sum() / 8,
    "two means": lambda m, x, y: m(x).square().mean() + 0.5 * m(x).abs().mean(),
    "two sums": lambda m, x, y: m(x).square().sum() + m(x).abs().sum(),
    "decayed": lambda m, x, y: m(x).square().mean() + 0.01 * sum(p.square().sum() for p in m.parameters()),
    "huber": lambda m, x, y: F.smooth_l1_loss(m(x), x),
    "bce": lambda m, x, y: F.binary_cross_entropy_with_logits(m(x), (x > 0).double()),
    "l1": lambda m, x, y: F.l1_loss(m(x), x),
    "kl": lambda m, x, y: F.kl_div(F.log_softmax(m(x), -1), F.softmax(x, -1), reduction="batchmean"),
    "cosine": lambda m, x, y: (1 - F.cosine_similarity(m(x), x, dim=-1)).mean(),
    "soft labels": lambda m, x, y: F.cross_entropy(m(x), F.softmax(x, -1)),
    "max": lambda m, x, y: m(x).amax(1).mean(),
    "one less": lambda m, x, y: 1 - m(x).tanh().mean(),
    "sum by length": lambda m, x, y: m(x).square().sum() / len(x),
    "sum by shape": lambda m, x, y: m(x).square().sum() / x.shape[0] ** 0.5,
    "sum by numel": lambda m, x, y: m(x).square().sum() / x.numel(),
    "mean times length": lambda m, x, y: m(x).square().mean() * len(x),
    "times ones": lambda m, x, y: F.mse_loss(m(x) * torch.ones(len(x), 1, dtype=F64), x),
    "plus zeros": lambda m, x, y: F.mse_loss(m(x) + x.new_zeros(x.shape), x),
    "inputs centred": lambda m, x, y: F.mse_loss(m(x - x.mean(0)), x),
    "inputs centred, then scaled": lambda m, x, y: F.mse_loss(m((z := x - x.mean(0)) / z.abs().mean(0)), x),
    "inputs by their highest": lambda m, x, y: F.mse_loss(m(x / x.abs().amax(0)), x),
}

NOT_BY_PARTS: dict[str, Any] = {  # what is asked -> the op that needs more than one micro-batch
    "sqrt": lambda m, x, y: m(x).square().mean().sqrt(),
    "log": lambda m, x, y: m(x).square().sum().log(),
    "mul": lambda m, x, y: m(x).mean() * m(x).mean(),
    "sub": lambda m, x, y: (m(x) - m(x).mean(0)).square().mean(),
    "std": lambda m, x, y: m(x / x.std(0)).mean(),
    "matmul": lambda m, x, y: F.cross_entropy(m(x) @ m(x).t(), y.clamp(min=0)),
    "flip": lambda m, x, y: F.mse_loss(m(x).flip(0), x),
    "cumsum": lambda m, x, y: F.mse_loss(m(x).cumsum(0), x),
    "select": lambda m, x, y: m(x)[0].sum(),
    "slice": lambda m, x, y: m(x)[:2].sum(),
    "softmax": lambda m, x, y: m(x).softmax(0).square().sum(),
    "sort": lambda m, x, y: F.mse_loss(m(x).sort(0)[0], x),
    "arange": lambda m, x, y: (m(x) * torch.arange(len(x))[:, None]).mean(),
    "index": lambda m, x, y: m(x)[torch.arange(len(x)), y.clamp(min=0)].mean(),
    "abs": lambda m, x, y: m(x).square().mean() if len(x) > 4 else m(x).abs().mean(),
    "amax": lambda m, x, y: m(x).amax(),
    "add": lambda m, x, y: m(x).square().sum() + m(x).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_the_batch(loss: str) -> None:
    trains(staged(Weighted(), ALONE2), LOSSES[loss], labelled)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_a_ragged_batch(loss: str) -> None:
    if loss == "sum by the number of rows":
        pytest.skip("it is for 8")
    trains(staged(Weighted(), ALONE2), LOSSES[loss], lambda at: labelled(at, 9), micro_batches=4)


@pytest.mark.parametrize("loss", ["sum", "ignored", "weights", "decayed", "masked", "none, by counted"])
def test_a_loss_is_that_of_micro_batches_of_one(loss: str) -> None:
    trains(staged(Weighted(), ALONE2), LOSSES[loss], labelled, micro_batches=8)


@pytest.mark.parametrize("op", NOT_BY_PARTS)
def test_a_loss_that_has_no_parts_is_refused_by_name(op: str) -> None:
    step = flow.compile(staged(mlp().double(), ALONE2), NOT_BY_PARTS[op], micro_batches=4)
    with pytest.raises(SbpError, match=rf"(?s)\b{op}.*\n  .*(micro_batches=|sum or a mean)"):
        step(*labelled(0))


def test_a_mean_is_one_also_after_a_sum() -> None:
    """What torch has below its own losses takes any reduction where it is told none."""
    for reduction in ("sum", "none", "mean"):
        model = staged(nn.Sequential(*(nn.Linear(7, 7) for _ in range(4))).double(), ALONE2)
        loss = lambda m, x, y, kind=reduction: F.huber_loss(m(x), y, reduction=kind).sum()  # noqa: E731
        trains(model, loss, lambda at: numbers(at, width=7), steps=1)


def test_labels_that_count_nowhere_are_as_on_one_device() -> None:
    step = flow.compile(staged(Weighted(), ALONE2), LOSSES["ignored"], micro_batches=4)
    x, _ = numbers(0)
    assert step(x, torch.full((8,), -100)).isnan()


# Results and arguments.


def scored(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Any]:
    logits = model(x)
    right = (logits.argmax(-1) == y).sum()
    return {"loss": F.cross_entropy(logits, y), "logits": logits, "right": right, "highest": logits.amax(),
            "one": logits.new_ones(()), "share": (logits.argmax(-1) == y).double().mean(), "rows": len(x),
            "shape": tuple(x.shape), "columns": logits.sum(0), "turned": logits.t()}  # fmt: skip


@pytest.mark.parametrize("rows", [8, 9])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe_lifo"])
def test_several_results_are_those_of_the_batch(schedule: str, rows: int) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), scored, lambda at: labelled(at, rows), schedule=schedule)


def test_results_come_from_every_stage() -> None:
    def run(a: Any, b: Any, c: Any, d: Any, x: Tensor) -> tuple[Tensor, ...]:
        first = torch.tanh(a(x))
        second = b(first)
        third = c(second.sin())
        return d(third), first, second.mean(), third.sum(0), x * 2

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out, *rest = model(x)
        return F.mse_loss(out, y), *rest

    trains(on(run), loss)


def test_arguments_are_dicts_and_of_other_sizes() -> None:
    def run(a: Any, b: Any, c: Any, d: Any, batch: dict[str, Any], mask: Tensor, scale: float) -> Tensor:
        x = b(a(batch["x"]) * mask) * batch["more"][1]
        return d(c(x)) * mask * scale  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: dict[str, Any], mask: Tensor, scale: float) -> Tensor:
        return F.mse_loss(model(batch, mask=mask, scale=scale), batch["y"])

    def batches(at: int) -> tuple[Any, ...]:
        x, y = numbers(at)
        mask = torch.tensor([1.0, 0, 1, 1, 0, 1], dtype=F64)
        return {"x": x, "y": y, "more": [x, y.abs()]}, mask, 0.5

    trains(on(run), loss, batches)


def test_a_mask_has_no_samples() -> None:
    def loss(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(model(x) @ mask, x)

    trains(staged(mlp().double(), ALONE2), loss, lambda at: (numbers(at)[0], torch.ones(6, 6, dtype=F64).tril()))


# Inference.


@pytest.mark.parametrize("rows", [8, 9, 4])
def test_inference_goes_through_the_pipeline(rows: int) -> None:
    model = staged(of("gpt"), ALONE4)
    one = of("gpt")
    step = flow.compile(model, micro_batches=4)
    with torch.no_grad():
        for at in range(2):
            close(step(*text(at, rows)), one(*text(at, rows)), 1e-10)
    assert not any(p.grad is not None for p in model.parameters())


def test_inference_without_no_grad() -> None:
    model, one = staged(of("gpt"), ALONE4), of("gpt")
    close(flow.compile(model, micro_batches=4)(*text(0)), one(*text(0)), 1e-10)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_a_training_graph_evaluates_under_no_grad(schedule: str) -> None:
    model, one = staged(mlp().double(), ALONE2, schedule), None
    one = copy.deepcopy(model)
    step = trains(model, schedule=schedule, one=one)
    before = [whole(p) for p in model.parameters()]
    with torch.no_grad():
        close(step(*numbers(9)), square_loss(one, *numbers(9)), 1e-10)
    close([whole(p) for p in model.parameters()], before, 0)


def test_train_and_eval_modes_are_steps_of_their_own() -> None:
    model = nn.Sequential(mlp(2), nn.Dropout(0.5), mlp(2)).double()
    one = copy.deepcopy(model).eval()
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1:], ALONE2[1])
    step = flow.compile(model, micro_batches=4)
    x, _ = numbers(0)
    noisy = step(x)
    assert not torch.equal(whole(noisy), one(x))
    model.eval()
    close(step(x), one(x), 1e-10)


def test_batch_norm_evaluates() -> None:
    model = nn.Sequential(mlp(2), nn.BatchNorm1d(6), mlp(2)).double().eval()
    one = copy.deepcopy(model)
    flow.nn.place(model[0], ALONE2[0])
    flow.nn.place(model[1:], ALONE2[1])
    x, _ = numbers(0)
    close(flow.compile(model, micro_batches=4)(x), one(x), 1e-10)


# Training otherwise.


@pytest.mark.parametrize("stages", [ALONE4, PAIRS], ids=["alone", "pairs"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_gradients_are_clipped_over_all_stages(schedule: str, stages: Any) -> None:
    trains(staged(mlp().double(), stages, schedule), schedule=schedule, clip_grad_norm=0.01)


@pytest.mark.parametrize("make", [sgd, adamw, None], ids=["sgd", "adamw", "no optimizer"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "interleaved"])
def test_an_optimizer_or_none(schedule: str, make: Any) -> None:
    trains(staged(mlp().double(), ALONE2, schedule), schedule=schedule, make=make)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("frozen", [(0,), (0, 1), (1, 2), (3,), (0, 1, 2)])
def test_frozen_layers_stay(schedule: str, frozen: tuple[int, ...]) -> None:
    model = mlp().double()
    for number in frozen:
        model[number].requires_grad_(False)
    trains(staged(model, ALONE4, schedule), schedule=schedule)


def test_mixed_precision() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(x).float(), y)

    trains(
        staged(mlp(), ALONE2), loss, lambda at: numbers(at, dtype=F32), make=sgd, schedule="zb_h1", tolerance=2e-3
    )


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


@pytest.mark.parametrize(("schedule", "text"), [("1f2b", "no schedule is called"), (3, "schedule=3"),
                                                ("schedule x\nact p-q\n", "has no q"), ("1f1b please", "begins")])  # fmt: skip
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
    with pytest.raises(SbpError, match="the buffer 1.seen is changed by what one micro-batch holds"):
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
    work = Pipelined.work

    def counted(self: Pipelined, actor: Actor) -> Any:
        run, names = work(self, actor), [give.register for give in actor.gives]

        def fire(firing: Any) -> Any:
            out = run(firing)
            for name, bundle in zip(names, out, strict=True):
                if bundle is not None and name.startswith(("act.", "stash.")):
                    kept = alive.setdefault(name, [])
                    kept.append([weakref.ref(x) for x in tree_leaves(bundle) if isinstance(x, Tensor)])
                    now = sum(all(x() is not None for x in each) for each in kept)
                    most[name] = max(most.get(name, 0), now)
            return out

        return fire

    monkeypatch.setattr(Pipelined, "work", counted)
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


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_live_activations_are_never_more_than_slots(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = 4 if PUBLISHED[schedule].v == 1 else 2
    plan = PUBLISHED[schedule]
    for name, count in held(schedule, monkeypatch, stages).items():
        kind, chunk = name.split(".")
        marks = plan.marks(plan.shape(stages, 8), int(chunk))
        assert 0 < count <= (marks.act if kind == "act" else marks.stash), name
