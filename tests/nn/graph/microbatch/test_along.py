"""Time as an axis of the rule book: how values lie along it, what is made before the step, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sbpflow.nn.graph.microbatch.along import Along, along
from sbpflow.nn.graph.microbatch.needs_all import said
from sbpflow.nn.graph.microbatch.peel import peeled
from sbpflow.placement.errors import SbpError
from sbpflow.sbp.call import refs_in
from sbpflow.sbp.state import Runs

from ..same import traced

BATCH = 8


class Called(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.two, self.bag = nn.Linear(4, 4), nn.Parameter(torch.randn(2, 4)), nn.EmbeddingBag(10, 4)
        self.register_buffer("weights", torch.ones(4))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


def made(function: Callable[..., Any], lengths: tuple[int, ...] = (3, 1, 4)) -> Along:
    """A function of a linear layer, samples and labels, along time."""
    logical, _ = traced(Called(function), torch.ones(BATCH, 4), torch.zeros(BATCH, dtype=torch.long))
    return along(logical, Runs((lengths,)), {"0": ((0,), ()), "1": ((0,),)})


STATES: dict[str, tuple[Callable[..., Any], str]] = {
    "logits": (lambda m, x, y: m.layer(x), "S(0)"),
    "turned": (lambda m, x, y: m.layer(x).t(), "S(1)"),
    "mean": (lambda m, x, y: m.layer(x).mean(), "P"),
    "sum": (lambda m, x, y: m.layer(x).sum(), "P"),
    "mean of columns": (lambda m, x, y: m.layer(x).mean(0), "P"),
    "mean of rows": (lambda m, x, y: m.layer(x).mean(1), "S(0)"),
    "highest": (lambda m, x, y: m.layer(x).amax(), 'P("max")'),
    "lowest": (lambda m, x, y: m.layer(x).amin(0), 'P("min")'),
    "weights": (lambda m, x, y: m.layer.weight.square().sum(), "B"),
    "loss": (lambda m, x, y: F.cross_entropy(m.layer(x), y, reduction="sum"), "P"),
    "mean loss": (lambda m, x, y: F.mse_loss(m.layer(x), x), "P"),
    "with a penalty": (lambda m, x, y: F.mse_loss(m.layer(x), x) + m.layer.weight.square().sum(), "P"),
    "one less": (lambda m, x, y: 1 - m.layer(x).mean(), "P"),
    "of those that count": (lambda m, x, y: F.cross_entropy(m.layer(x), y, ignore_index=0), "P"),
    "the first": (lambda m, x, y: m.layer(x)[0], "P"),
    "in order": (lambda m, x, y: x.sort(0)[0], "B"),
    "heads": (lambda m, x, y: m.layer(x).view(BATCH * 2, 2).t().reshape(2, -1), "S(1)"),
    "without an upper end": (lambda m, x, y: m.layer(x).clamp(0.0, math.inf), "S(0)"),  # as falcon_h1's steps of time
    "by label": (lambda m, x, y: m.layer(x)[torch.arange(len(x)), y], "S(0)"),
    "a weight of each": (lambda m, x, y: m.layer(x) + m.two.repeat(len(x) // 2, 1), "S(0)"),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("lengths", [(2, 2, 2, 2), (3, 1, 4), (1,) * 8], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_the_rule_book_says_how_a_value_lies_along_time(name: str, lengths: tuple[int, ...]) -> None:
    function, state = STATES[name]
    found = made(function, lengths)
    assert [said(found.states[n], 1) for n in refs_in(found.logical.result)] == [state]


def test_of_one_micro_batch_everything_is_whole() -> None:
    found = made(lambda m, x, y: F.cross_entropy(m.layer(x - x.mean(0)).softmax(0), y), (8,))
    assert not any(state.split or state.partial for state in found.states.values())


BEFORE: dict[str, tuple[Callable[..., Any], int]] = {
    "none": (lambda m, x, y: F.mse_loss(m.layer(x), x), 0),
    "labels that count": (lambda m, x, y: F.cross_entropy(m.layer(x), y), 1),
    "mean": (lambda m, x, y: m.layer(x - x.mean(0)).sum(), 1),
    "highest": (lambda m, x, y: m.layer(x / x.amax(0)).sum(), 1),
    "one of another": (lambda m, x, y: m.layer((z := x - x.mean(0)) / z.abs().mean(0)).sum(), 2),
    "weights of labels": (lambda m, x, y: F.cross_entropy(m.layer(x), y, weight=m.weights), 1),
    "in order": (lambda m, x, y: F.mse_loss(m.layer(x.sort(0)[0]), x), 1),
    "numbers of samples": (lambda m, x, y: (m.layer(x) * torch.arange(len(x))[:, None]).sum(), 1),
    "filled, of the shape of samples": (lambda m, x, y: (m.layer(x) + x.new_ones(x.shape)).sum(), 0),
    "rows of a weight": (lambda m, x, y: (m.layer(x) + m.two.repeat(4, 1)).sum(), 1),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_is_made_of_arguments_alone_may_be_made_before_the_step(name: str) -> None:
    function, count = BEFORE[name]
    assert [len(micro.known) for micro in peeled(made(function))] == [count] * 3


def by_place(m: Any, x: Tensor, y: Tensor) -> Any:
    """A step of which each piece runs another program, and all need what is known."""
    out = m.layer(x - x.mean(0))
    return out[0].sum() + out[-2:].mean() + (out * torch.arange(len(x))[:, None]).mean() + F.cross_entropy(out, y)


@pytest.mark.parametrize("function", [by_place, *(function for function, _ in BEFORE.values())])
def test_what_is_known_has_one_name_in_all_pieces(function: Callable[..., Any]) -> None:
    """By that it is made once for all of them."""
    micros = peeled(made(function))
    told = {(known.name, str(known.graph), known.dims, known.hides) for micro in micros for known in micro.known}
    assert len(told) == len({name for name, *_ in told})
    assert function is not by_place or (len({id(micro) for micro in micros}) == 3 and len(told) == 3)


@pytest.mark.parametrize("more", [torch.cat, lambda two: two[0].repeat(2, 1)], ids=["cat", "repeat"])
def test_what_is_given_is_cut_where_it_is_used(more: Callable[..., Tensor]) -> None:
    """Of as many columns as rows: cut by columns, a layer would make addends of it, of which no tanh is made."""
    logical, _ = traced(Called(lambda m, x, y: m.layer(more([x, x])).tanh()), torch.ones(4, 4), torch.zeros(4))
    found = along(logical, Runs(((1, 3),)), {"0": ((0,), ()), "1": ((0,),)})
    assert [said(found.states[n], 1) for n in refs_in(found.logical.result)] == ["S(0)"]


def test_a_share_is_an_argument_of_what_becomes_an_addend() -> None:
    micro = peeled(made(lambda m, x, y: m.layer(x).mean() + m.two.sum() - 1))[0]
    assert [(share.axes, share.dtype) for share in micro.shares] == [((0,), torch.float32)]


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "of a mean": (lambda m, x, y: m.layer(x).mean().sqrt(), r"sqrt at \S+:\d+ .*at once\n.* inputs are P\n  mean at "),
    "of all": (lambda m, x, y: m.layer(x).softmax(0), r"softmax.int at .* inputs are S\(0\)\n.*batch norm in eval"),
    "of each other": (lambda m, x, y: m.layer(x) @ m.layer(x).t(), r"matmul at .* inputs are S\(0\), S\(1\)\n"),
    "two by two": (
        lambda m, x, y: torch.stack([z.exp() for z in m.layer(x).split(2)]),
        "split.Tensor at .*\n  it takes samples one by one",
    ),
    "words in a line": (
        lambda m, x, y: m.bag(y, torch.arange(0, len(y), 2)) + m.layer(x)[:4],
        r"embedding_bag\S* at .*\n  it is in bag.*\n  words are in a line",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_other_micro_batches_is_refused_with_its_line(name: str) -> None:
    function, wanted = REFUSED[name]
    with pytest.raises(SbpError, match=f"(?s){wanted}"):
        made(function)
