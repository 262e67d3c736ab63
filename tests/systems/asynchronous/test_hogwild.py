"""Hogwild: threads change the same weights without a lock, each a few rows at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import sbpflow as flow
from sbpflow.nn.asynchronous import lock_free
from sbpflow.placement.world import World

FEATURES, WORKERS, TRUE = 2000, 4, torch.randn(2000, generator=torch.Generator().manual_seed(99))


class Logistic(nn.Module):
    """A weight for each feature, of which a sample has ten."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Embedding(FEATURES, 1, sparse=True)
        nn.init.zeros_(self.weights.weight)

    def forward(self, features: Tensor) -> Tensor:
        y: Tensor = self.weights(features).sum((1, 2))
        return y


def loss_of(model: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(features), labels)


def samples(many: int, seed: int, low: int = 0, high: int = FEATURES) -> tuple[Tensor, Tensor]:
    features = torch.randint(low, high, (many, 10), generator=torch.Generator().manual_seed(seed))
    return features, (TRUE[features].sum(1) > 0).float()


def batches(worker: int, many: int, **cut: int) -> list[tuple[Tensor, Tensor]]:
    return [samples(8, 1000 * worker + at, **cut) for at in range(many)]


def test_sparse_logistic_regression_converges() -> None:
    each = [batches(worker, 500) for worker in range(WORKERS)]
    together, alone = Logistic(), Logistic()
    run = flow.nn.hogwild(together, loss_of, each, lr=5.0)
    flow.nn.hogwild(alone, loss_of, [[batch for listed in each for batch in listed]], lr=5.0)
    mine, one = (loss_of(model, *samples(2000, 7)).item() for model in (together, alone))
    assert one < 0.3  # it began with log 2 = 0.69
    assert mine < 1.05 * one
    assert [len(losses) for losses in run.losses] == [500] * WORKERS
    assert sum(run.delays.values()) == 500 * WORKERS


def test_workers_that_share_no_row_are_as_if_alone_to_the_bit() -> None:
    """Nothing else is written than the rows of a gradient, and nobody's update is lost to another's."""
    size = FEATURES // (WORKERS + 1)  # and some that nobody has
    each = [batches(w, 100, low=w * size, high=(w + 1) * size) for w in range(WORKERS)]
    together, alone = Logistic(), Logistic()
    memory = together.weights.weight.data_ptr()
    flow.nn.hogwild(together, loss_of, each, lr=5.0)
    flow.nn.hogwild(alone, loss_of, [[batch for listed in each for batch in listed]], lr=5.0)
    assert torch.equal(together.weights.weight, alone.weights.weight)
    plain = Logistic()
    optimizer = torch.optim.SGD(plain.parameters(), lr=5.0)
    for batch in (batch for listed in each for batch in listed):
        optimizer.zero_grad()
        loss_of(plain, *batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(together.weights.weight, plain.weights.weight)
    assert together.weights.weight.data_ptr() == memory
    assert not together.weights.weight[WORKERS * size :].any()


def test_a_dense_weight_changes_while_others_compute_with_it() -> None:
    """Autograd would complain of a weight that changed since a forward; here that is meant."""
    model, turn = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.eye(8)[torch.randperm(8)]

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        return x, x @ turn

    run = flow.nn.hogwild(
        model, lambda m, x, y: mse_loss(m(x), y), [[batch(100 * w + k) for k in range(100)] for w in range(3)], lr=0.1
    )
    assert max(losses[-1] for losses in run.losses) < 0.5 * min(losses[0] for losses in run.losses)


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = [batches(0, 1)]
    with pytest.raises(flow.SbpflowError, match=r"lr=0\.0"):
        flow.nn.hogwild(Logistic(), loss_of, given, lr=0.0)
    with pytest.raises(flow.SbpflowError, match="no worker has a batch"):
        flow.nn.hogwild(Logistic(), loss_of, [[]], lr=1.0)
    model = flow.nn.to_global(Logistic(), flow.placement("cpu", [0]))
    with pytest.raises(flow.SbpflowError, match=r"weights.weight is a global tensor"):
        flow.nn.hogwild(model, loss_of, given, lr=1.0)
    monkeypatch.setattr(lock_free, "world", lambda: World(0, 2, 1.0, None))
    with pytest.raises(flow.SbpflowError, match="threads of one process"):
        flow.nn.hogwild(Logistic(), loss_of, given, lr=1.0)
