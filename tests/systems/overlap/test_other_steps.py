"""The ends of chunks where there is one stage, no optimizer, no loss, or slices of sequences."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.actors import Folding
from sbpflow.placement.errors import SbpError

from .stages import ADAMW, layers, loss_fn

P, Q = flow.placement("cpu:[0-1]"), flow.placement("cpu:[2-3]")


def whole(model: nn.Module) -> list[Tensor]:
    return [x.full_tensor() for x in model.state_dict().values()]


def one_stage(**options: Any) -> list[Tensor]:
    model = layers(4, 8)
    step = flow.compile(model, loss_fn, ADAMW(model), placement=P, micro_batches=4, **options)
    for at in range(3):
        step(torch.ones(16, 8) * at, torch.ones(16, 8))
    return whole(model)


def slices(**options: Any) -> list[Tensor]:
    model = layers(4, 8)
    flow.nn.pipeline(model, [P, Q], "terapipe")
    how: dict[str, Any] = {"micro_batches": 2, "schedule": "terapipe", "slices": 2}
    step = flow.compile(model, loss_fn, ADAMW(model), **how, **options)
    for at in range(3):
        step(torch.ones(4, 8, 8) * at, torch.ones(4, 8, 8))
    return whole(model)


def no_optimizer(**options: Any) -> list[Tensor]:
    model = layers(4, 8)
    flow.nn.pipeline(model, [P, Q], "1f1b")
    step = flow.compile(model, loss_fn, micro_batches=4, schedule="1f1b", **options)
    step(torch.ones(16, 8), torch.zeros(16, 8))
    return [x.grad.full_tensor() for x in model.parameters() if isinstance(x.grad, flow.GlobalTensor)]


def no_loss(**options: Any) -> list[Tensor]:
    model = layers(4, 8)
    flow.nn.pipeline(model, [P, Q], "bfpp")
    flow.nn.shard(model, {"*": S(0)})
    step = flow.compile(model, micro_batches=4, schedule="bfpp", **options)
    with torch.no_grad():
        return [step(torch.ones(16, 8)).full_tensor()]


@pytest.mark.parametrize("way", [one_stage, slices, no_optimizer, no_loss])
def test_a_step_is_the_same(way: Callable[..., list[Tensor]]) -> None:
    usual = way()
    assert usual
    assert all(map(torch.equal, usual, way(overlap=True)))
    parts = way(overlap=Folding(once=True, parts=2))
    if way is no_loss:  # whose parts have fewer rows: some processors add up their products in another order
        torch.testing.assert_close(parts, usual, rtol=1e-5, atol=1e-7)
    else:
        assert all(map(torch.equal, usual, parts))


@pytest.mark.parametrize("way", [one_stage, slices])
def test_a_clipped_step_is_the_same(way: Callable[..., list[Tensor]]) -> None:
    assert all(map(torch.equal, way(clip_grad_norm=0.01), way(clip_grad_norm=0.01, post_validation=True)))


def test_what_is_offloaded_is_refused_where_it_may_be_taken_back() -> None:
    model = layers(4, 8)
    flow.nn.pipeline(model, [P, Q], "1f1b")
    flow.nn.offload(model, {"*": "cpu"})
    step = flow.compile(model, loss_fn, ADAMW(model), micro_batches=4, post_validation=True, clip_grad_norm=0.1)
    with pytest.raises(SbpError, match="is offloaded"):
        step(torch.ones(16, 8), torch.ones(16, 8))
