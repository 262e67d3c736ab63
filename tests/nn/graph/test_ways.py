"""The same graph by other ways: autocast, backends, copies, real ranks."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import (
    GRID,
    LINE,
    WHERE,
    batch,
    eager,
    loss_fn,
    net,
    same,
    same_model,
    sgd,
    trains_alike,
)
from tests.ranks import Ranks

# Autocast, copies, backends


@WHERE
def test_autocast_inside_build_is_eagers(where: flow.Placement) -> None:
    def cast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x).float(), y)

    trains_alike(net(torch.float32), where, loss=cast, tolerance=3e-2)


def test_autocast_around_the_call_is_noticed() -> None:
    model = net(torch.float32)
    forward = flow.compile(model, placement=LINE)
    x = batch(dtype=torch.float32)[0]
    with torch.no_grad():
        assert forward(x).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert forward(x).dtype is torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert forward(x).dtype is torch.float16
        assert forward(x).dtype is torch.float32


@pytest.mark.parametrize("backend", ["autograd", "code"])
def test_backends_agree(backend: Any) -> None:
    trains_alike(net(), GRID, backend=backend)


def test_a_copy_of_a_graph_has_a_model_of_its_own() -> None:
    model, one = net(), net()
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=LINE), sgd(one)
    step(*batch())
    eager(one, loss_fn, ones, *batch())
    other: Any = copy.deepcopy(step)
    step(*batch(at=7))
    same_model(other.model, one)
    same(other(*batch(at=1)), eager(one, loss_fn, ones, *batch(at=1)))
    same_model(other.model, one)


def test_a_graph_is_not_pickled() -> None:
    with pytest.raises(SbpError, match=r"^Linear: a graph cannot be pickled, .*\n  save model.state_dict\(\)"):
        pickle.dumps(flow.compile(nn.Linear(2, 2)))


# Real ranks


def on_ranks() -> list[float]:
    model, one = net(), net()
    torch.manual_seed(0)
    step, ones = flow.compile(model, loss_fn, sgd(model), placement=GRID), sgd(one)
    losses = []
    for at in range(3):
        loss = step(*batch(at=at))
        same(loss, eager(one, loss_fn, ones, *batch(at=at)))
        losses.append(loss.item())
    same_model(model, one)
    return losses


def test_on_real_ranks(ranks4: Ranks) -> None:
    found = ranks4(on_ranks)
    assert all(losses == found[0] for losses in found)


def differing_seeds() -> str:
    model = nn.Sequential(net(), nn.Dropout())
    torch.manual_seed(10 + torch.distributed.get_rank())
    try:
        flow.compile(model, loss_fn, placement=LINE)(*batch())
    except SbpError as error:
        return str(error)
    return ""


def differing_seeds_of_which_none_is_used() -> list[float]:
    model = net()
    torch.manual_seed(10 + torch.distributed.get_rank())
    return [flow.compile(model, loss_fn, placement=LINE)(*batch()).item()]


def differing_plans() -> str:
    class Differs(flow.nn.Graph):
        def build(self, x: Tensor) -> Tensor:
            return x + torch.distributed.get_rank()

    try:
        Differs(placement=LINE)(torch.ones(4))
    except SbpError as error:
        return str(error)
    return ""


def differing_weights() -> str:
    model = nn.Linear(4, 3).double()
    nn.init.constant_(model.bias, torch.distributed.get_rank())
    step = flow.compile(model, loss_fn, placement=LINE)
    try:
        step(*batch())
    except SbpError as error:
        return str(error)
    return ""


def test_ranks_that_differ_are_told(ranks4: Ranks) -> None:
    for text in ranks4(differing_plans):
        assert "made different plans of Differs\n  build must do the same on every rank" in text
    for text in ranks4(differing_weights):
        assert "have different values in" in text
    for text in ranks4(differing_seeds):
        assert "seed" in text
