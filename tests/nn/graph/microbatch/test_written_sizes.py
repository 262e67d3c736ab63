"""Steps in micro-batches that go by how many samples the batch has: each refused with its line and the cause."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import F64, LINE, batch, trains_alike

Between = Callable[["Middle", Tensor], Tensor]


class Middle(nn.Module):
    """Two layers with something between; the batch has 8 samples, of 6 numbers there."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.between = between
        self.first, self.last = nn.Linear(4, 6).to(F64), nn.Linear(6, 3).to(F64)
        self.token, self.bag = nn.Parameter(torch.randn(1, 1, 6).to(F64)), nn.EmbeddingBag(10, 6).to(F64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self, self.first(x)))
        return out


def run(between: Between, micro_batches: int = 4) -> None:
    flow.compile(
        Middle(between), lambda m, x, y: F.cross_entropy(m(x), y), placement=LINE, micro_batches=micro_batches
    )(*batch())


ONE_BY_ONE: dict[str, Between] = {
    "unbind": lambda s, h: torch.stack([row * 2 for row in h.unbind(0)]),
    "split": lambda s, h: torch.cat([row * 2 for row in torch.split(h, 1)]),
    "for row in h": lambda s, h: torch.stack([row * 2 for row in h]),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_samples_taken_one_by_one(name: str) -> None:
    """Was a bare ValueError of zip()."""
    with pytest.raises(SbpError, match=r"^(unbind|split)\S* at .*test_written_sizes.py:\d+ makes 8 tensors of the bat"):
        run(ONE_BY_ONE[name])


# What is written down -> whether the error says so, for as many as the batch has.
WRITTEN: dict[str, tuple[Between, bool]] = {
    "zeros(8, 6)": (lambda s, h: h + torch.zeros(8, 6, dtype=F64), True),
    "arange(8)": (lambda s, h: h + torch.arange(8)[:, None], True),
    "param.repeat(8, 1, 1)": (lambda s, h: h + s.token.repeat(8, 1, 1)[:, 0], True),
    "expand(8, 6)": (lambda s, h: h + s.token[0].expand(8, 6), True),
    "view(8, -1), used later": (lambda s, h: F.pad(h, (0, 2)).view(8, -1)[:, :6], True),
    "reshape(8, 6)": (lambda s, h: h.reshape(8, 6), False),
    "view(48)": (lambda s, h: h.view(48).view(-1, 6), False),
    "split([2, 6])": (lambda s, h: torch.cat(torch.split(h, [2, 6])), False),
    "h[7]": (lambda s, h: h + h[7], False),
    "h[range(8)]": (lambda s, h: torch.stack([h[i] for i in range(8)]), False),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_sizes_of_the_batch_that_are_written_down(name: str) -> None:
    """Were torch's own RuntimeError, IndexError, ValueError."""
    between, told = WRITTEN[name]
    here, parts = r"test_written_sizes\.py:\d+\n", "Middle cuts the batch into parts of 2 of 8 samples, and the step"
    said = rf"{parts} does not run on these: at \S+{here}  .*\n"
    said += rf"  8, as many as samples the batch has, is written down at \S+{here}" if told else "  write it for any"
    with pytest.raises(SbpError, match=said):
        run(between)


def test_an_error_of_the_step_itself_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"shape '.5, 7.' is invalid for input of size 48"):
        run(lambda s, h: h.view(5, 7))


def test_what_no_rule_knows_says_so() -> None:
    with pytest.raises(SbpError, match=r"embedding_bag\S* at .*:\d+ needs more than one micro-batch.*\n  it is in bag"):
        run(lambda s, h: h + s.bag(h.long().abs().clamp(0, 9).flatten(), torch.arange(0, h.numel(), 6)))


def heads(h: Tensor, bias: Tensor) -> Tensor:
    """Each sample as two heads, in one dim with the samples; a bias as ALiBi is the same for all of these."""
    key = torch.ones(3, 3, dtype=F64).expand(2 * len(h), 3, 3)
    return torch.baddbmm(bias, h.reshape(2 * len(h), 1, 3), key).reshape(len(h), 6)


FREE: dict[str, Between] = {
    "repeat_interleave": lambda s, h: h.repeat_interleave(2, 0).tanh().view(len(h), 2, 6).sum(1),
    "repeat_interleave of columns": lambda s, h: h.repeat_interleave(2, dim=-1)[:, ::2],
    "param.repeat(len(h), 1, 1)": lambda s, h: h + s.token.repeat(len(h), 1, 1)[:, 0],
    "a bias for each head of a sample": lambda s, h: heads(
        h, torch.arange(6, dtype=F64).view(2, 1, 3).repeat(len(h), 1, 1)
    ),
    "zeros(len(h))": lambda s, h: h + torch.zeros(len(h), 6, dtype=F64),
}


@pytest.mark.parametrize("name", FREE)
def test_what_goes_sample_by_sample(name: str) -> None:
    trains_alike(Middle(FREE[name]), LINE, steps=2, micro_batches=3)
