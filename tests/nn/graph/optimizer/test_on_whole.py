"""Optimizers that look at more than an element step on whole tensors, and what they get is in the plan."""

from typing import Any

import pytest
import torch
from torch import nn, optim

import sbpflow as flow
from sbpflow import S
from sbpflow.boxing.graph.text.parse import from_text
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import eager, same, same_model
from tests.ranks import Ranks

from .test_on_shards import DATA, LIES, Lamb, batch, laid, loss_fn

EVERY = pytest.mark.parametrize("lies", LIES)


def matrices() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


@EVERY
def test_muon_is_that_of_one_device_though_it_computes_in_bfloat16(lies: str) -> None:
    model, one = laid(matrices(), lies), matrices()
    mine, ones = (optim.Muon(each.parameters(), lr=0.02) for each in (model, one))
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    for at in range(5):
        same(step(*batch(at)), eager(one, loss_fn, ones, *batch(at)))
    same_model(model, one)


def sends_what_is_told(step: Any) -> None:
    """A trained step sends what its plan says, and its text says it all."""
    for at in range(2):  # the first has no state yet
        args = [flow.tensor(x, placement=DATA, sbp=S(0)) for x in batch(at)]
        with flow.record() as moves:
            step(*args)
    sent = sum(move.boxing.total for move in moves if move.op != "same values")
    assert sent == sum(row.total * row.count for row in step.explain().moves) > 0
    assert from_text(step.text()).sources == step.physical.sources


@pytest.mark.sampled(3)
@EVERY
@pytest.mark.parametrize("make", [Lamb, lambda p: optim.Adafactor(p, 0.1)], ids=["Lamb", "Adafactor"])
def test_what_is_gathered_for_the_step_is_in_the_plan(lies: str, make: Any) -> None:
    model = laid(matrices(), lies)
    step = flow.compile(model, loss_fn, make(model.parameters()), placement=DATA)
    sends_what_is_told(step)
    assert {s.whole for s in step.physical.sources if s.kind == "parameter"} == {2 if make is Lamb else None}


@EVERY
def test_states_rest_in_pieces_between_steps(lies: str) -> None:
    model = laid(matrices(), lies)
    step = flow.compile(model, loss_fn, Lamb(model.parameters()), placement=DATA)
    step(*batch(0))
    memory = step.explain().memory
    assert memory is not None
    for rank, held in step.memory_at_rest().items():
        assert held.states == memory.ranks[rank].states < 2 * 8 * (28 + 21)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_two_optimizers_of_two_kinds(clip: float | None) -> None:
    model, one = matrices(), matrices()
    laid(model, "pieces of rows")

    class Both(flow.nn.Graph):
        def __init__(self) -> None:
            super().__init__(placement=DATA, clip_grad_norm=clip)
            self.model = model
            self.first, self.second = Lamb([model[0].weight]), optim.AdamW(model[2].parameters(), lr=0.1)

        def build(self, x: Any, y: Any) -> Any:
            loss = loss_fn(self.model, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

    step, ones = Both(), (Lamb([one[0].weight]), optim.AdamW(one[2].parameters(), lr=0.1))
    for at in range(3):
        loss = loss_fn(one, *batch(at))
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(one.parameters(), clip)
        for each in ones:
            each.step()
            each.zero_grad()
        same(step(*batch(at)), loss)
    same_model(model, one)


def test_an_eager_backward_before_a_step_counts() -> None:
    model, one = laid(matrices(), "pieces of rows"), matrices()
    mine, ones = Lamb(model.parameters()), Lamb(one.parameters())
    step = flow.compile(model, loss_fn, mine, placement=DATA)
    for at in range(3):
        if at == 1:
            for each in (model, one):
                loss_fn(each, *batch(9)).backward()  # type: ignore[no-untyped-call]
        step(*batch(at))
        eager(one, loss_fn, ones, *batch(at))
    same_model(model, one)


def trained(lies: str) -> list[torch.Tensor]:
    model = laid(matrices(), lies)
    step = flow.compile(model, loss_fn, Lamb(model.parameters()), placement=DATA)
    for at in range(3):
        step(*batch(at))
    return [p.detach().full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def test_real_ranks_step_whole_tensors(ranks4: Ranks) -> None:
    one = matrices()
    ones = Lamb(one.parameters())
    for at in range(3):
        eager(one, loss_fn, ones, *batch(at))
    for lies in ("pieces of rows", "columns"):
        for found in ranks4(trained, lies):
            for p, q in zip(found, one.parameters(), strict=True):
                same(p, q)


def test_a_limit_counts_what_is_whole_for_the_step() -> None:
    def limited(memory: float | None) -> Any:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Tanh(), nn.Linear(64, 3, bias=False)).double()
        flow.nn.shard(model, {"*": S(0)})
        step = flow.compile(model, loss_fn, Lamb(model.parameters()), placement=DATA, memory=memory)
        report = step.plan_for(*batch(0)).explain().memory
        assert report is not None
        return report.ranks[0]

    held = limited(None)
    assert held.total >= held.parameters + held.gradients + held.states + 4 * 8 * (256 + 192)
    assert limited(held.total).total <= held.total
    with pytest.raises(SbpError, match=r"has 2 parameters whole for its step(.*\n)*.*take one that does, as AdamW"):
        limited(held.total - 1)
