"""Stages of which some weights, or all, are frozen, under schedules without a flush: nothing is updated that is not to
be, and stages of several ranks bring frozen weights to who needs them once a step."""

import pytest
import torch

import sbpflow as flow
from sbpflow import S

from .stages import layers, numbers, ranks, squares, whole


def trained(schedule: str, frozen: tuple[str, ...], *, pairs: bool) -> tuple[list[torch.Tensor], set[str]]:
    model = layers(4)
    for name, x in model.named_parameters():
        x.requires_grad_(not name.startswith(frozen))
    before = [x.detach().clone() for x in model.parameters()]
    grid = flow.placement("cpu:[0-7] as (pipe=4, data=2)")
    flow.nn.pipeline(model, [grid.at(pipe=i) for i in range(4)] if pairs else ranks(4), schedule)
    if pairs:
        flow.nn.shard(model, {"*.weight": {"data": S(0)}})
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
    step = flow.compile(model, squares, optimizer, micro_batches=9, schedule=schedule)
    for at in range(2):
        step(*numbers(18, at))
    after = whole(model)
    pairs_of = zip(model.named_parameters(), after, before, strict=True)
    return after, {name for (name, _), new, old in pairs_of if not torch.equal(new, old)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw", "pipemare_corrected"])
@pytest.mark.parametrize("frozen", [("0",), ("0.0.bias", "3")], ids=str)
def test_frozen_weights_stay_and_others_learn(schedule: str, frozen: tuple[str, ...]) -> None:
    alone, moved = trained(schedule, frozen, pairs=False)
    assert moved == {name for name, _ in layers(4).named_parameters() if not name.startswith(frozen)}
    both, _ = trained(schedule, frozen, pairs=True)
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-12)
