"""A limit of memory is kept by the account that `explain` shows, which is that of a step that runs."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B
from sbpflow.placement.errors import SbpError
from tests.nn.graph.memory.test_liveness import Live

LINE = flow.placement("cpu", range(4))


class Words(nn.Module):
    """Little to keep for the backward, and logits in float32 of which several copies are live at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(2048, 256), nn.Linear(256, 256)
        self.head = nn.Linear(256, 2048, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(self.words(text)))).float()
        return F.cross_entropy(logits.flatten(0, 1), text.flatten())


def compiled(limit: float | None) -> flow.nn.Graph:
    model = flow.nn.shard(Words(), {"*": B})  # whole parameters, of which a limit leaves the states in pieces
    loss = lambda model, text: model(text)  # noqa: E731
    return flow.compile(model, loss, torch.optim.AdamW(model.parameters()), placement=LINE, memory=limit)


def text() -> Tensor:
    return torch.zeros(8, 64, dtype=torch.long)


def most(step: flow.nn.Graph) -> float:
    """Bytes of the fullest rank, as `explain` says."""
    memory = step.explain().memory
    assert memory is not None
    return float(max(held.total for held in memory.ranks.values()))


@cache
def free() -> float:
    step = compiled(None)
    step(text())
    return most(step)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [0.9, 0.75, 0.65])
def test_a_limit_is_kept_by_the_account_that_explain_shows(share: float) -> None:
    limit = share * free()
    step = compiled(limit)
    step(text())
    assert most(step) <= limit


def test_a_limit_is_kept_by_a_step_that_runs() -> None:
    limit = 0.7 * free()
    step = compiled(limit)
    for _ in range(2):
        step(text())
    (optimizer,) = step.planned.optimizers
    states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, flow.GlobalTensor)]
    kept = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for of in (*states, *step.planned.model.held.values())
        for x in of._shards
    }
    live = Live()
    live.known.update(kept)
    with live:
        step(text())
    assert live.peak + sum(kept.values()) <= 4 * limit * 1.05  # of all four ranks, which one process has


class Tall(nn.Module):
    """Words of which there are many more than samples, so that a gathered head takes more than its logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(4096, 128), nn.Linear(128, 4096, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.words(text)).float().flatten(0, 1), text.flatten())


def test_a_head_is_split_along_its_words_where_gathering_it_takes_too_much() -> None:
    """Of what is gathered nothing is kept, so that a count of what is kept alone called every plan too large."""
    model = Tall()
    loss = lambda model, text: model(text)  # noqa: E731
    grid = flow.placement("cuda", range(4))

    def make(limit: float | None) -> flow.nn.Graph:
        return flow.compile(model, loss, torch.optim.AdamW(model.parameters()), placement=grid, memory=limit)

    given = torch.zeros(8, 16, dtype=torch.long, device="meta")
    with torch.device("meta"), flow.use_cluster("h100x8"):
        need = most(make(None).plan_for(given))
        step = make(0.7 * need).plan_for(given)
    assert most(step) <= 0.7 * need


def test_where_nothing_fits_it_says_what_takes_most_and_what_would_help() -> None:
    step = compiled(0.05 * free())
    with pytest.raises(SbpError, match="no plan fits into") as refused:
        step(text())
    said = str(refused.value)
    assert "activations" in said
    assert "most of what its backward keeps: " in said
    assert "use more ranks" in said or "micro_batches=" in said
