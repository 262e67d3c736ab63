"""A step in micro-batches that takes samples one by one, or counts them, is right or says which line does it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.row, self.two = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.body(self, self.first(x)))
        return y


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def learn(body: Body) -> None:
    """Losses and gradients in a pipeline are those of one device."""
    model = Net(body)
    one, draw = copy.deepcopy(model), torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 4, generator=draw), torch.randint(4, (8,), generator=draw)
    flow.nn.place(model.first, flow.placement("cpu", [0]))
    flow.nn.place(model.second, flow.placement("cpu", [1]))
    loss, expected = flow.compile(model, loss_fn, micro_batches=4)(x, y), loss_fn(one, x, y)
    torch.autograd.backward(expected)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


ROWS: dict[str, Body] = {
    "unbind(0)": lambda m, h: torch.stack([row * 2 for row in h.unbind(0)]),
    "torch.unbind": lambda m, h: torch.stack([row * 2 for row in torch.unbind(h)]),
    "split(1)": lambda m, h: torch.cat([row * 2 for row in torch.split(h, 1)]),
    "for row in h": lambda m, h: torch.stack([row * 2 for row in h]),
    "zip": lambda m, h: torch.stack([a + b for a, b in zip(h, h, strict=True)]),
    "chunk(8)": lambda m, h: torch.cat([row * 2 for row in h.chunk(8)]),
}


@pytest.mark.parametrize("body", ROWS.values(), ids=list(ROWS))
def test_samples_one_by_one_are_an_error_with_the_line_and_the_cause(body: Body) -> None:
    wanted = (
        r"at .*test_analysis.py:\d+ makes 8 tensors of the batch, and 2 of a micro-batch\n  it takes samples one by one"
    )
    with pytest.raises(SbpError, match=wanted):
        learn(body)


REPEATED: dict[str, Body] = {
    "repeat": lambda m, h: torch.cat([m.row[None].repeat(len(h), 1, 1), h[:, None]], 1).sum(1),
    "expand": lambda m, h: torch.cat([m.row[None].expand(len(h), -1, -1), h[:, None]], 1).sum(1),
    "tile": lambda m, h: h + m.row.tile(len(h), 1),
    "tile of fewer dims": lambda m, h: h + m.row[0].tile(len(h), 1),
    "repeat_interleave": lambda m, h: h + m.row.repeat_interleave(len(h), 0),
    "samples repeated": lambda m, h: h.repeat_interleave(2, 0).view(-1, 2, 4).sum(1),
}


@pytest.mark.parametrize("body", REPEATED.values(), ids=list(REPEATED))
def test_a_weight_repeated_for_each_sample_is_what_it_is_on_one_device(body: Body) -> None:
    learn(body)


COUNTED: dict[str, tuple[str, Body]] = {
    "two in turn": ("repeat", lambda m, h: h + m.two.repeat(len(h) // 2, 1)),
    "two each": ("repeat_interleave", lambda m, h: h + m.two.repeat_interleave(len(h) // 2, 0)),
    "tiles of two": ("tile", lambda m, h: h + m.two.tile(len(h) // 2, 1)),
    "a list": ("stack", lambda m, h: h + torch.stack([m.row[0]] * len(h))),
    "two in turn, seen otherwise": ("repeat", lambda m, h: h + (m.two.repeat(len(h) // 2, 1) * 2)),
}


@pytest.mark.parametrize(("name", "body"), COUNTED.values(), ids=list(COUNTED))
def test_what_is_made_by_the_number_of_samples_is_named_where_it_is_made(name: str, body: Body) -> None:
    with pytest.raises(
        SbpError, match=rf"\n  {name}\S* at .*test_analysis.py:\d+ makes one by the number of samples\n"
    ):
        learn(body)


def test_a_sum_of_a_weight_repeated_for_each_sample_is_not_that_of_a_micro_batch() -> None:
    """It was taken for the same in every micro-batch, which has fewer samples."""
    for body in (
        lambda m, h: h + m.row.repeat_interleave(len(h), 0).sum(0),
        lambda m, h: h * m.row.repeat(len(h), 1).sum(0),
    ):
        with pytest.raises(SbpError, match="needs more than one micro-batch"):
            learn(body)


def test_a_number_of_samples_that_is_written_down_is_named() -> None:
    with pytest.raises(
        SbpError, match=r"8, as many as samples the batch has, is written down at .*test_analysis.py:\d+"
    ):
        learn(lambda m, h: h + m.row.repeat(8, 1))
