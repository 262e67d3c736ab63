"""Losses, inference, results and arguments of a step in micro-batches: those of the whole batch, or refused by name."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError

from .pipes import ALONE2, ALONE4, F64, close, mlp, numbers, of, often, square_loss, staged, text, trains, whole
from .test_pipeline import on

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
        flow.nn.place(self, ALONE2[1])  # the weights


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
    "a sum and a mean": lambda m, x, y: m(x).square().sum() + m(x).square().mean(),
    "a mean less a sum": lambda m, x, y: m(x).square().mean() - 0.1 * m(x).square().sum(),
    "ignored, decayed": lambda m, x, y: F.cross_entropy(m(x), y) + 0.01 * sum(p.square().sum() for p in m.parameters()),
    "ignored, with sizes": lambda m, x, y: F.cross_entropy(z := m(x), y) + 0.1 * z.logsumexp(-1).square().mean(),
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
    "inputs by their deviation": lambda m, x, y: F.mse_loss(m(x / x.std(0)), x),
    "inputs in order": lambda m, x, y: F.mse_loss(m(x.sort(0)[0]), x.flip(0)),
    "to the next label": lambda m, x, y: F.cross_entropy(m(x), y.roll(1).clamp(min=0)),
    "by sample numbers": lambda m, x, y: (m(x) * torch.arange(len(x))[:, None]).mean(),
    "of labels": lambda m, x, y: m(x)[torch.arange(len(x)), y.clamp(min=0)].mean(),
    "of the first sample": lambda m, x, y: m(x)[0].sum(),
    "of two samples": lambda m, x, y: m(x)[:2].sum() + m(x)[-1].mean(),
    "by how many there are": lambda m, x, y: m(x).square().mean() if len(x) > 4 else m(x).abs().mean(),
    "one more": lambda m, x, y: m(x).square().sum() + 1,
    "repeated": lambda m, x, y: (m(x).repeat_interleave(3, 0).tanh() * torch.arange(3 * len(x))[:, None]).mean(),
    "by place": lambda m, x, y: (m(x) * m[0][0].bias).sum(0).mul(x.std(0)).mean(),
}

NOT_BY_PARTS: dict[str, Any] = {  # what is asked -> the op that needs more than one micro-batch
    "sqrt": lambda m, x, y: m(x).square().mean().sqrt(),
    "log": lambda m, x, y: m(x).square().sum().log(),
    "mul": lambda m, x, y: m(x).mean() * m(x).mean(),
    "sub": lambda m, x, y: (m(x) - m(x).mean(0)).square().mean(),
    "std": lambda m, x, y: (m(x) / m(x).std(0)).mean(),
    "matmul": lambda m, x, y: F.cross_entropy(m(x) @ m(x).t(), y.clamp(min=0)),
    "flip": lambda m, x, y: F.mse_loss(m(x).flip(0), x),
    "cumsum": lambda m, x, y: F.mse_loss(m(x).cumsum(0), x),
    "softmax": lambda m, x, y: m(x).softmax(0).square().sum(),
    "sort": lambda m, x, y: F.mse_loss(m(x).sort(0)[0], x),
    "amax": lambda m, x, y: m(x).amax(),
}


@pytest.mark.sampled(4)  # in one process tests/nn/graph/microbatch/test_peel.py has them all
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_the_batch(loss: str) -> None:
    trains(staged(Weighted(), ALONE2), LOSSES[loss], labelled)


RAGGED = ["ignored", "weights", "sum by length", "inputs centred, then scaled"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", often(RAGGED, [name for name in LOSSES if name not in RAGGED]))
def test_a_loss_is_that_of_a_ragged_batch(loss: str) -> None:
    if loss == "sum by the number of rows":
        pytest.skip("it is for 8")
    trains(staged(Weighted(), ALONE2), LOSSES[loss], lambda at: labelled(at, 9), micro_batches=4)


@pytest.mark.sampled(2)
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "rows"), [("1f1b", 8), ("zb_h1", 9), ("gpipe_lifo", 9)])
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [9, 4])
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
