"""Gradients of micro-batches are added up where they rest: in pieces if they are said to, in pipelines too."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import sbpflow as flow
from sbpflow import B, S
from sbpflow.sbp.trial import one_thread
from tests.ranks import Ranks

from ..alike import eager, same, same_model
from ..run.weights.test_weight_versions import batch, layers, loss_fn, recurrence

GRID = flow.placement("cpu:[0-3] as (pipe=2, data=2)")
CUT, WHOLE = {"data": S(0)}, {"data": B}
RESTS: dict[str, dict[str, Any]] = {
    "data parallel": {"weights": WHOLE},
    "ZeRO-1": {"weights": WHOLE, "states": CUT},
    "ZeRO-2": {"weights": WHOLE, "grads": CUT, "states": CUT},
    "ZeRO-3": {"weights": CUT},
    "gradients alone": {"weights": WHOLE, "grads": CUT},
    "whole gradients": {"weights": CUT, "grads": WHOLE},
}
EVERY = pytest.mark.parametrize("rest", RESTS)


def said(model: nn.Module, rest: str) -> nn.Module:
    for kind, sbp in RESTS[rest].items():
        flow.nn.shard(model, {"*": sbp}, kind)  # type: ignore[arg-type]
    return model


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.05)


def piped(model: nn.Sequential, rest: str, schedule: str | None, many: int = 4, **options: Any) -> flow.nn.Graph:
    said(model, rest)
    if schedule is None:
        return flow.compile(model, loss_fn, adamw(model), placement=GRID.at(pipe=0), micro_batches=many, **options)
    flow.nn.pipeline(model, [GRID.at(pipe=0), GRID.at(pipe=1)], schedule)
    return flow.compile(model, loss_fn, adamw(model), micro_batches=many, schedule=schedule, **options)


def alike(rest: str, schedule: str | None, steps: int = 5, **options: Any) -> flow.nn.Graph:
    model = layers(4)
    one = copy.deepcopy(model)
    step, ones = piped(model, rest, schedule, **options), adamw(one)
    for at in range(steps):
        x, y = batch(16)
        same(step(x + at, y), eager(one, loss_fn, ones, x + at, y, clip=options.get("clip_grad_norm")))
    same_model(model, one)
    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v", "interleaved"])
@EVERY
def test_micro_batches_train_as_one_device(rest: str, schedule: str | None) -> None:
    alike(rest, schedule)


@pytest.mark.parametrize("rest", ["ZeRO-1", "ZeRO-2"])
def test_gradients_of_pieces_are_clipped_over_stages(rest: str) -> None:
    alike(rest, "1f1b", 2, clip_grad_norm=0.05)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
@EVERY
def test_a_schedule_without_a_flush_is_its_recurrence(rest: str, schedule: str) -> None:
    model, (x, y) = layers(2), batch(16)
    plain = copy.deepcopy(model)
    losses = recurrence(plain, schedule, 4, lambda p, lr: optim.AdamW(p, lr=0.05), x, y)  # type: ignore[arg-type]
    loss = piped(model, rest, schedule)(x, y)
    assert loss.item() == pytest.approx(sum(losses) / 4, rel=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("rest", ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "gradients alone"])
def test_each_rank_adds_up_what_it_keeps(rest: str) -> None:
    """A stage has two layers of 8 x 8 and 8 numbers; in pieces of rows each of two ranks has half."""
    step = alike(rest, "1f1b", 1)
    tasks = step.planned.program.proved.firsts[0].tasks  # type: ignore[union-attr]
    added = {slot: tasks.layouts[part] for part, slot in tasks.sums.items()}
    held = sum(torch.Size(of.local_shape(0)).numel() for of in added.values() if 0 in of.placement)
    assert held <= 144
    if rest in ("ZeRO-2", "ZeRO-3", "gradients alone"):
        assert held == 72


def test_what_is_brought_home_each_time_is_sent_each_time() -> None:
    with flow.use_cluster("flat"), one_thread():
        step = piped(layers(4), "ZeRO-2", None)
        x, y = batch(2048)
        step(x, y)
        with flow.record() as moves:
            step(x, y)
    planned: dict[str, int] = {}
    for row in step.explain().moves:
        planned[row.direction] = planned.get(row.direction, 0) + row.total * row.count
    sent = sum(move.boxing.total for move in moves if move.op != "same values")
    assert planned["backward"]
    assert planned["update"]
    assert sent == 4 * (planned["forward"] + planned["backward"]) + planned["update"]
    assert sum(move.op == "bucket" for move in moves) == 4  # all parameters of a chunk at once


def trained(rest: str) -> tuple[list[Tensor], dict[int, tuple[int, int]]]:
    """The weights after three pipelined steps, and bytes that this rank holds of parameters and states."""
    model = layers(4)
    step = piped(model, rest, "1f1b")
    for at in range(3):
        x, y = batch(16)
        step(x + at, y)
    held = {rank: (of.parameters, of.states) for rank, of in step.memory_at_rest().items()}
    return [p.full_tensor().detach() for p in model.parameters()], held  # type: ignore[attr-defined]


@pytest.mark.sweep
def test_real_ranks_train_alike(ranks4: Ranks) -> None:
    one = layers(4)
    ones = adamw(one)
    for at in range(3):
        x, y = batch(16)
        eager(one, loss_fn, ones, x + at, y)
    whole = 8 * 2 * 72
    for rest, weights, states in (("ZeRO-1", whole, whole), ("ZeRO-2", whole, whole), ("ZeRO-3", whole // 2, whole)):
        for rank, (found, held) in enumerate(ranks4(trained, rest)):
            for p, q in zip(found, one.parameters(), strict=True):
                same(p, q)
            assert held == {rank: (weights, states)}
