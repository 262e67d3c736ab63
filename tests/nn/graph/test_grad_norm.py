"""The norm of gradients that a graph clips can be read; an optimizer that a graph does not know is told of it."""

import copy

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import LINE, batch, loss_fn, net, same, sgd
from tests.nn.graph.paths import Path, every_path


@every_path
def test_the_norm_is_that_before_clipping(path: Path) -> None:
    one = net()
    model = path.placed(copy.deepcopy(one), ["0", "1"])
    step, ones = flow.compile(model, loss_fn, sgd(model), clip_grad_norm=0.1, **path.options), sgd(one)
    for at in range(2):
        step(*batch(at=at))
        loss_fn(one, *batch(at=at)).backward()  # type: ignore[no-untyped-call]
        same(step.grad_norm, nn.utils.clip_grad_norm_(one.parameters(), 0.1))
        ones.step()
        ones.zero_grad()


def test_a_limit_that_clips_nothing_tells_the_norm_too() -> None:
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE, clip_grad_norm=float("inf"))
    step(*batch())
    assert 0 < step.grad_norm.item() < 100


def test_no_norm_where_nothing_clips() -> None:
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    step(*batch())
    with pytest.raises(SbpError, match="has no clip_grad_norm="):
        _ = step.grad_norm
    step = flow.compile(net(), loss_fn, placement=LINE, clip_grad_norm=1.0)
    step(*batch())
    with pytest.raises(SbpError, match="has no optimizer"):
        _ = step.grad_norm


def test_an_optimizer_that_the_graph_was_not_given() -> None:
    """It was told to be made after to_global, which nobody had called."""
    model = net()
    optimizer = sgd(model)
    flow.compile(model, loss_fn, placement=LINE)(*batch())
    with pytest.raises(SbpError, match=r"before the graph's first step(?s:.*)give it to the graph, as in"):
        optimizer.step()
    later, before = sgd(model), model[0].weight.full_tensor().clone()
    later.step()
    assert not torch.equal(model[0].weight.full_tensor(), before)
