"""Garbage in circles waits while a step is planned and compiled, and is looked for again behind that."""

import gc

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

P = flow.placement("cpu", [0])


def test_a_step_is_planned_without_a_search_for_garbage() -> None:
    seen: list[bool] = []

    def build(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        return torch.as_tensor(model(x).sum())

    searched: list[str] = []
    gc.callbacks.append(lambda phase, info: searched.append(phase))
    try:
        flow.compile(nn.Linear(3, 3), build, placement=P).plan_for(torch.ones(2, 3)).step_for(
            torch.ones(2, 3)
        ).prepare()
        gc.collect()
    finally:
        gc.callbacks.pop()
    assert seen == [False]
    assert gc.isenabled()
    assert len(searched) <= 6  # behind the plan, behind the compiling, and the last


def test_it_is_looked_for_again_after_an_error_and_not_where_nobody_had_it_looked_for() -> None:
    def wrong(model: nn.Module, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        flow.compile(nn.Linear(3, 3), wrong, placement=P).plan_for(torch.ones(2, 3))
    assert gc.isenabled()
    gc.disable()
    try:
        flow.compile(nn.Linear(3, 3), placement=P)(torch.ones(2, 3))
        assert not gc.isenabled()
    finally:
        gc.enable()
