"""EmbeddingBag of rows keeps samples apart, so that it goes through a pipeline; bags in a line do not."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.eager.bags import bag_of_rows
from sbpflow.placement.errors import SbpError
from tests.ranks import Ranks

WORDS = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 0, 4], [5, 1, 0], [2, 2, 2], [0, 3, 1], [1, 0, 5], [3, 3, 4]])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
KINDS = [(mode, padding, False) for mode in ("sum", "mean", "max") for padding in (None, 0, -6)] + [
    ("sum", None, True),
    ("sum", 0, True),
]


def weights_of(words: Tensor) -> Tensor:
    return words.double().remainder(3) / 3 + 0.5


@pytest.mark.parametrize(("mode", "padding", "weighed"), KINDS)
def test_bags_of_rows_are_what_torch_makes_of_them(mode: str, padding: int | None, weighed: bool) -> None:
    torch.manual_seed(0)
    table = torch.randn(6, 4, dtype=torch.float64)
    found = []
    for bag in (F.embedding_bag, bag_of_rows):
        weight = table.clone().requires_grad_()
        how: Any = {"mode": mode, "padding_idx": padding}
        y = bag(WORDS, weight, **how, per_sample_weights=weights_of(WORDS) if weighed else None)
        (grad,) = torch.autograd.grad((y * torch.arange(32).reshape(8, 4)).sum(), weight)
        found.append((y, grad))
    torch.testing.assert_close(found[1], found[0])


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None, weighed: bool = False, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = nn.EmbeddingBag(6, 4, mode=mode, padding_idx=padding, dtype=torch.float64, **more)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).double()
        self.weighed = weighed

    def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
        y: Tensor = self.layers(self.bag(words, offsets, weights_of(words) if self.weighed else None))
        return y


def loss_fn(model: nn.Module, words: Tensor, labels: Tensor, *offsets: Tensor) -> Tensor:
    return F.cross_entropy(model(words, *offsets), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def learn(mode: str, padding: int | None, weighed: bool) -> None:
    model = Bags(mode, padding, weighed)
    one = copy.deepcopy(model)
    flow.nn.pipeline(model.layers, [flow.placement("cpu", [0, 1]), flow.placement("cpu", [2])])
    step, alone = flow.compile(model, loss_fn, sgd(model), micro_batches=4), sgd(one)
    for _ in range(3):
        loss = loss_fn(one, WORDS, LABELS)
        torch.autograd.backward(loss)
        alone.step()
        alone.zero_grad()
        assert step(WORDS, LABELS).item() == pytest.approx(loss.item(), rel=1e-10)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mode", "padding", "weighed"), KINDS)
def test_bags_of_rows_train_in_a_pipeline(mode: str, padding: int | None, weighed: bool) -> None:
    learn(mode, padding, weighed)


@pytest.mark.sweep
def test_bags_of_rows_train_in_a_pipeline_on_ranks(ranks4: Ranks) -> None:
    ranks4(learn, "mean", 0, False)


@pytest.mark.parametrize("last", [False, True])
def test_bags_in_a_line_are_refused_in_a_pipeline_with_what_to_do(last: bool) -> None:
    model = Bags("mean", None, include_last_offset=last)
    flow.nn.pipeline(model.layers, [flow.placement("cpu", [0]), flow.placement("cpu", [1])])
    offsets = torch.arange(0, 24 + last, 3)
    message = (
        r"embedding_bag.padding_idx at .*test_bags.py:\d+ needs more than one micro-batch(.|\n)*give rows of words"
    )
    with pytest.raises(SbpError, match=message):
        flow.compile(model, loss_fn, micro_batches=4)(WORDS.flatten(), LABELS, offsets)


def test_bags_of_a_step_in_one_piece_are_one_op() -> None:
    model = Bags("mean", None)
    step = flow.compile(model, placement=flow.placement("cpu", [0, 1])).plan_for(WORDS)
    assert "embedding_bag" in step.text()
