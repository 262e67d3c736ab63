"""Predictions: the work of a step, its share of the peak, and what a training takes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow


class Net(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_fn(net: nn.Module, ids: Tensor) -> Tensor:
    return torch.as_tensor(net(ids).square().mean())


def given(rows: int = 8) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Net(), torch.zeros(rows, 64, dtype=torch.long)


WORK = 4 * 3 * 2 * (8 * 64) * 512 * 512.0  # forward, and a product each for gradients of inputs and of weights


@pytest.mark.parametrize(
    "more",
    ["", "4 micro-batches", "recompute layers.*", "cast ** to bf16", "**: data=S(0)", "layers.*: data=S(0)"],
)
def test_work_is_that_of_the_model_whatever_the_plan(more: str) -> None:
    net, ids = given()
    found = flow.predict(
        net, ids, f"grid cuda (data=4)\ninput ids <- data=S(0)\n{more}", cluster="h100x8", loss_fn=loss_fn
    )
    assert found.work == {torch.bfloat16 if "bf16" in more else torch.float32: WORK}
    assert (found.ranks, found.samples, found.tokens) == (4, 8, 512)
    assert found.seconds == found.checked.seconds > 0


def test_a_pipeline_does_the_same_work() -> None:
    net, ids = given()
    plan = "grid cuda (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches"
    found = flow.predict(net, ids, plan, cluster="h100x8", loss_fn=loss_fn)
    assert found.work == {torch.float32: WORK}
    assert found.ranks == 4


def test_shares_days_and_money_are_of_the_seconds() -> None:
    net, ids = given()
    found = flow.predict(net, ids, "grid cuda (data=4)\ncast ** to bf16", cluster="h100x8", loss_fn=loss_fn)
    assert found.utilization == pytest.approx(WORK / (found.seconds * 4 * 989.4e12))
    assert found.tokens_per_second == pytest.approx(512 / found.seconds)
    assert found.days(1e9) == pytest.approx(1e9 / 512 * found.seconds / 86400)
    assert found.money(1e9, 2.5) == pytest.approx(found.days(1e9) * 24 * 4 * 2.5)
    said = found.dict(1e9, 2.5)
    assert said["days"] == found.days(1e9)
    assert said["money"] == found.money(1e9, 2.5)
    assert found.dict(1e9)["money"] is None
    assert "days" not in found.dict()


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ("", 4 + 8),
        ("cast ** to bf16", 2 + 4),
        ("cast ** to bf16\ncast {grads,states} ** to fp32", 2 + 4 + 8),
        ("**: data=S(0)", 4 + 8),
        ("offload states ** to cpu", 4 + 8),
    ],
)
def test_a_checkpoint_has_weights_and_states_once(more: str, each: int) -> None:
    net, ids = given()
    numbers = sum(p.numel() for p in net.parameters())
    for grid in ("grid cuda (data=4)", "grid cuda (pipe=2, data=2)\npipe layers over pipe by 1f1b, 4 micro-batches"):
        if "pipe" not in grid or "offload" not in more:
            found = flow.predict(net, ids, f"{grid}\n{more}", cluster="h100x8", loss_fn=loss_fn)
            assert found.resting.saved == numbers * each


def test_what_is_not_trained_has_no_states() -> None:
    net, ids = given()
    for layer in list(net.children())[1].children():
        layer.weight.requires_grad_(False)
    found = flow.predict(net, ids, "grid cuda (data=4)", cluster="h100x8", loss_fn=loss_fn)
    assert found.resting.saved == 4 * (4 * 512 * 512) + 12 * (1000 * 512)


def test_a_training_that_fails_takes_longer_by_what_is_assumed() -> None:
    net, ids = given()
    found = flow.predict(net, ids, "grid cuda (data=4)", cluster="h100x8", loss_fn=loss_fn)
    of = found.training(1e12, price=2.5)
    assert of.days * of.share == pytest.approx(found.days(1e12))
    assert of.money == pytest.approx(found.money(1e12, 2.5) / of.share)
    assert found.dict(1e12)["failures"] == found.training(1e12).dict()
    often = flow.Failures(rate=0.1, restart=60)
    line = next(line for line in found.lines(1e12, failures=often) if line.startswith("  failures "))
    assert line.startswith("  failures one in 2.5 h, a save of ")
    assert line.endswith("; assumed 0.1 stops a device and hour, 0.122 GB/s a device to save, 60 s to start again")
    with pytest.raises(flow.SbpError, match="say of how many words"):
        found.training(0)


def test_a_plan_that_does_not_fit_says_so() -> None:
    net, ids = given()
    known = flow.cluster("h100x8")
    small = replace(known, device=replace(known.device, memory=1e6))
    found = flow.predict(net, ids, "grid cuda (data=4)", cluster=small, loss_fn=loss_fn)
    assert not found.fits
    assert "does not fit: H100 has" in str(found)


def test_samples_stand_for_words_where_there_are_none() -> None:
    with torch.device("meta"):
        net, x = nn.Linear(64, 64), torch.empty(32, 64)
    found = flow.predict(net, x, "grid cuda (data=4)", cluster="h100x8")
    assert (found.samples, found.tokens) == (32, 32)


def test_the_planners_answer_has_its_prediction_and_fills_in_a_grid() -> None:
    net, ids = given()
    found = flow.find_plan(net, ids, plan="cast ** to bf16", cluster="h100x8*2", loss_fn=loss_fn)
    assert "grid cuda (data=2, tensor=8)\ncast ** to bf16" in str(found)
    again = flow.predict(net, ids, found, cluster="h100x8*2", loss_fn=loss_fn)
    assert again.work == found.prediction.work == {torch.bfloat16: WORK}
    assert again.seconds == pytest.approx(found.prediction.seconds)
    assert found.prediction.ranks == 16
