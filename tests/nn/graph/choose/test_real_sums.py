"""Encoded gradients are sums of which more than one rank has an addend."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.physical import Back

P4 = flow.placement("cpu:[0-3] as (data=4)")


class Tied(nn.Module):
    def __init__(self, width: int = 8, words: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.layer(self.embed(x))))
        return y


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1).flatten())


def with_decay(model: nn.Module, x: Tensor) -> Tensor:
    return plain(model, x) + 0.01 * sum(w.square().sum() for w in model.parameters())


def one_addend(back: Back) -> bool:
    return not back.src.state.partial and not back.src.state.split and bool(back.dst.state.partial)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"memory": 2**20}], ids=str)
@pytest.mark.parametrize("loss", [plain, with_decay])
def test_a_whole_gradient_is_no_addend_of_an_encoded_sum(loss: Any, options: dict[str, Any]) -> None:
    """Nothing was split, one rank's gradient was the sum, and its bytes were sent; each rank computed all of it."""
    torch.manual_seed(0)
    x, alone = torch.randint(0, 16, (8, 4)), Tied()
    expected = loss(alone, x).item()
    model = flow.nn.compress(alone, flow.encoders.int8())
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), placement=P4, **options)
    assert step(x).item() == pytest.approx(expected, rel=1e-5)
    backs = step.physical.backs
    assert [back for back in backs if back.encoding]
    assert not step.explain().idle
    assert not any(map(one_addend, backs))


@pytest.mark.parametrize("cluster", ["cpu", "h100x8"])
def test_a_step_of_which_nothing_can_be_split_is_told_of(cluster: str) -> None:
    """Where moves are hidden, infinite costs of what is forbidden were taken off each other, which is no number."""
    weight = nn.Linear(5, 5, bias=False)
    flow.nn.compress(weight, flow.encoders.int8())
    made = flow.compile(
        weight,
        lambda model, x: torch.linalg.det(model.weight + x),
        torch.optim.SGD(weight.parameters(), lr=0.1),
        placement=P4,
    )
    with flow.use_cluster(flow.cluster(cluster)):
        made(torch.eye(5))
    assert any("data" in line for line in made.explain().idle)
