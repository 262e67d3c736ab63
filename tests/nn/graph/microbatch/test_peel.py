"""The step of one micro-batch: run piece by piece, a step is what it is on one device."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.nn.graph.microbatch.peel import _Peeled
from sbpflow.placement.errors import SbpError

from ..pipes import ALONE2, F64, of, often, staged, text, trains, words_loss
from ..test_pipeline_losses import LOSSES, Weighted, labelled
from .piecewise import Between, Step, layers, run, same_piecewise
from .test_attention import llama_told, masked, padded, told, words

MIDDLE: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "a weight repeated": lambda m, h: h + m.token[0].repeat(len(h), 1),
    "a weight repeated, in front": lambda m, h: torch.cat([m.token.expand(len(h), -1, -1), h[:, None]], 1).sum(1),
    "a weight tiled": lambda m, h: h + m.token[0].tile(len(h), 1),
    "a weight repeated in a row": lambda m, h: h + m.token[0].repeat_interleave(len(h), 0),
    "two in turn": lambda m, h: h + m.two.repeat(len(h) // 2, 1),
    "two each": lambda m, h: h + m.two.repeat_interleave(len(h) // 2, 0),
    "a list": lambda m, h: h + torch.stack([m.token[0, 0]] * len(h)),
    "a sum by the number of samples": lambda m, h: h * m.token[0].repeat(len(h), 1).sum(0),
    "samples repeated": lambda m, h: h.repeat_interleave(2, 0).tanh().view(-1, 2, 6).sum(1),
    "columns repeated": lambda m, h: h.repeat_interleave(2, dim=-1)[:, ::2],
    "zeros(len(h), 6)": lambda m, h: h + torch.zeros(len(h), 6, dtype=F64),
    "zeros(8, 6)": lambda m, h: h + torch.zeros(8, 6, dtype=F64),
    "new_ones(8, 6)": lambda m, h: h + h.new_ones(8, 6),
    "arange(8)": lambda m, h: h + torch.arange(8)[:, None],
    "token.repeat(8, 1, 1)": lambda m, h: h + m.token.repeat(8, 1, 1)[:, 0],
    "expand(8, 6)": lambda m, h: h + m.token[0].expand(8, 6),
    "view(8, -1)": lambda m, h: F.pad(h, (0, 2)).view(8, -1)[:, :6],
    "reshape(8, 6)": lambda m, h: h.reshape(8, 6),
    "view(48)": lambda m, h: h.view(48).view(-1, 6),
    "samples inside": lambda m, h: (
        h.view(8, 2, 3).transpose(0, 1).reshape(16, 3).tanh().view(2, 8, 3).mean(0).repeat(1, 2)
    ),
    "rows by number": lambda m, h: h.view(8, 2, 3)[torch.arange(len(h)), torch.arange(8) % 2].repeat(1, 2),
    "by how many there are": lambda m, h: h.sin() if len(h) == 8 else h.cos(),
    "of samples known before": lambda m, h: h * torch.arange(8.0, dtype=F64).softmax(0)[:, None],
    "a function with a backward of its own": lambda m, h: Doubled.apply(h),  # type: ignore[no-untyped-call]
    "in place": lambda m, h: h.clone().mul_(2).add_(m.token[0]),
}


class Doubled(torch.autograd.Function):
    """Twice a number, and three times its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, dtype=F64, generator=draw), torch.randint(3, (8,), generator=draw)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("micro_batches", [3, 4])
@pytest.mark.parametrize("name", MIDDLE)
def test_what_goes_sample_by_sample(name: str, micro_batches: int) -> None:
    same_piecewise(layers(MIDDLE[name]), batch(), micro_batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", often(["samples repeated", "two in turn", "token.repeat(8, 1, 1)"], list(MIDDLE)))
def test_what_goes_sample_by_sample_in_a_pipeline(name: str) -> None:
    model = Between(MIDDLE[name])
    flow.nn.place(model.first, ALONE2[0])
    flow.nn.place(model, ALONE2[1])
    trains(model, lambda m, x, y: F.cross_entropy(m(x), y), lambda at: batch(), micro_batches=3)


APART: dict[str, Callable[[Between, Tensor], Tensor]] = {
    "unbind(0)": lambda m, h: torch.stack([row * 2 for row in h.unbind(0)]),
    "torch.unbind": lambda m, h: torch.stack([row * 2 for row in torch.unbind(h)]),
    "split(1)": lambda m, h: torch.cat([row * 2 for row in torch.split(h, 1)]),
    "split(2)": lambda m, h: torch.cat([rows.softmax(0) for rows in torch.split(h, 2)]),
    "for row in h": lambda m, h: torch.stack([row * 2 for row in h]),
    "zip": lambda m, h: torch.stack([a + b for a, b in zip(h, h, strict=True)]),
    "chunk(8)": lambda m, h: torch.cat([row * 2 for row in h.chunk(8)]),
    "tensor_split(4)": lambda m, h: torch.cat([rows * 2 for rows in h.tensor_split(4)]),
    "h[i]": lambda m, h: torch.stack([h[i] for i in range(8)]),
}


@pytest.mark.parametrize("name", APART)
def test_samples_are_taken_one_by_one(name: str) -> None:
    same_piecewise(layers(APART[name]), batch(), 4)


def test_parts_of_several_micro_batches_are_an_error_with_the_line_and_the_cause() -> None:
    wanted = r"^split\S* at .*test_peel.py:\d+ needs .*\n  it is in model, .* are S\(0\)\n  it takes samples one by one"
    with pytest.raises(SbpError, match=wanted):
        same_piecewise(layers(lambda m, h: torch.cat(torch.split(h, [2, 6]))), batch(), 4)


def test_a_sample_by_its_number_is_an_addend_and_not_a_value() -> None:
    with pytest.raises(SbpError, match=r"\n  select.int at .*test_peel.py:\d+ adds up over these"):
        same_piecewise(layers(lambda m, h: h + h[7]), batch(), 4)


def test_an_error_of_the_step_itself_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"shape '.5, 7.' is invalid for input of size 48"):
        same_piecewise(layers(lambda m, h: h.view(5, 7)), batch(), 4)


UNEVEN = [(3, 8), (5, 8), (3, 9), (4, 9), (9, 9)]
OF_EIGHT = {"sum by the number of rows"}  # which it writes down


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("loss", "micro_batches", "rows"),
    [(loss, m, rows) for loss in LOSSES for m, rows in UNEVEN if rows == 8 or loss not in OF_EIGHT],
)
def test_a_loss_is_that_of_the_batch(loss: str, micro_batches: int, rows: int) -> None:
    same_piecewise(Step(Weighted(), LOSSES[loss]), labelled(0, rows), micro_batches)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("micro_batches", "rows"), often([(3, 8)], [(5, 8), (3, 9), (4, 5)]))
@pytest.mark.parametrize(("kind", "tolerance"), [("gpt", 1e-12), ("llama", 1e-6)])  # which computes angles in float32
def test_models_are_what_they_are_on_one_device(kind: str, tolerance: float, micro_batches: int, rows: int) -> None:
    same_piecewise(Step(of(kind), words_loss), text(0, rows), micro_batches, tolerance=tolerance)


SLICES = often([(3, 8, (3, 2, 1)), (2, 8, 3)], [(1, 4, 3), (3, 8, 1), (2, 8, 6), (3, 6, 3), (4, 9, 4)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("micro_batches", "rows", "slices"), SLICES)
def test_slices_are_what_whole_sequences_are(micro_batches: int, rows: int, slices: Any) -> None:
    same_piecewise(Step(of("gpt"), told), words(0, rows), micro_batches, slices)
    same_piecewise(Step(of("llama"), llama_told), words(0, rows), micro_batches, slices, tolerance=1e-6)
    if rows == 8:
        same_piecewise(Step(of("gpt"), masked), (*words(0), padded()), micro_batches, slices)


PROGRAMS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "of one size": (lambda m, x, y: F.mse_loss(m(x), x), 4, 1),
    "of two sizes": (lambda m, x, y: F.mse_loss(m(x), x), 3, 2),
    "by place": (lambda m, x, y: m(x)[0].sum() + m(x)[-1].sum(), 4, 3),
    "by place, which is known before": (lambda m, x, y: (m(x) * (x - x[0])).sum(), 4, 1),
    "rows of a weight": (lambda m, x, y: (m(x) + m[0][0].bias.repeat(8, 1)).sum(), 4, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_pieces_that_do_the_same_run_one_program(name: str) -> None:
    loss, micro_batches, count = PROGRAMS[name]
    micros = same_piecewise(Step(Weighted(), loss), labelled(0), micro_batches)
    assert len(set(map(id, micros))) == count


def test_random_numbers_are_drawn_by_the_piece() -> None:
    model = Step(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double(), lambda m, x, y: m(x))
    ran, _ = run(model, labelled(0), 3)
    assert ran.result.shape == (8, 6)
    assert 0 < (ran.result == 0).sum() < 48


def test_a_pipeline_of_pieces_of_several_programs() -> None:
    trains(staged(Weighted(), ALONE2), lambda m, x, y: m(x)[1:6:2].sum() + m(x).square().mean(), labelled)


class Halved(nn.Module):
    """A layer that takes its samples apart and puts them together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return torch.cat([y.view(8, 2, 2)[:, :1], x.view(8, 2, 2)[:, 1:]], 1).flatten(1)


def test_equal_layers_are_compared_once_for_each_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, alike = Counter[int](), _Peeled.alike

    def counted(*given: Any) -> bool:
        compared[many] += 1
        return alike(*given)

    monkeypatch.setattr(_Peeled, "alike", counted)
    for many in (2, 6):
        model = nn.Sequential(*(Halved() for _ in range(many)))
        step = flow.compile(model, lambda m, x: m(x).square().mean(), plan="grid (data=1)\n4 micro-batches")
        step(torch.ones(8, 4))
    assert 0 < compared[2] == compared[6]
