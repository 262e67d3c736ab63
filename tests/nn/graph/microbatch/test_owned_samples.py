"""Samples that a step takes one by one: each micro-batch does what is said of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbpflow.placement.errors import SbpError

from .piecewise import Step, layers, run, same_piecewise
from .test_sorted_rows import numbers

ONE_BY_ONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "stacked": lambda m, z: torch.stack([one.softmax(0) for one in z.unbind(0)]),
    "joined": lambda m, z: torch.cat([one.exp() + m.two[:1] for one in torch.split(z, 1)]),
    "by their places": lambda m, z: torch.stack([z[at].square() * (at + 1) for at in range(len(z))]),
    "in slices": lambda m, z: torch.cat([z[at : at + 1].tanh() for at in range(len(z))]),
    "each of two": lambda m, z: torch.cat([one.expand(2, -1).cumsum(0) for one in z.unbind(0)]).view(-1, 2, 6).sum(1),
    "by columns": lambda m, z: torch.stack([one.sigmoid() for one in z.t().unbind(1)], 1).t(),
    "by a threshold": lambda m, z: torch.stack([one.where(one > 0, one * 0.1) for one in z]),
    "with arguments": lambda m, z: torch.stack([one * (n + 1) for one, n in zip(z, torch.arange(8), strict=True)]),
    "in pairs": lambda m, z: torch.cat([two.flip(0) * two for two in torch.split(z, [2, 1, 1, 2, 2])]),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_samples_one_by_one_are_those_of_the_batch(name: str) -> None:
    micros = same_piecewise(layers(ONE_BY_ONE[name]), numbers(), 2 if name == "in pairs" else 3)
    assert name in ("by their places", "with arguments", "in pairs") or micros[0] is micros[1] is not micros[2]


def test_what_is_known_has_a_name_of_its_own() -> None:
    """By that it is made once for all micro-batches, which know other things of their own samples."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Any:
        return torch.stack([z.exp() * (x * 2)[at, :3] for at, z in enumerate(m(x))]).mean()

    micros = same_piecewise(Step(nn.Linear(4, 3).double(), loss), numbers(), 3)
    told = {(known.name, str(known.graph), known.dims) for micro in micros for known in micro.known}
    assert len(told) == len({name for name, *_ in told}) == len({graph for _, graph, _ in told}) >= 8


def some(z: Tensor) -> Any:
    return sum(z[at].exp().sum() for at in (0, 4, 7)) + z[1].norm()


LOSSES: dict[str, Callable[..., Any]] = {
    "sum": lambda m, x, y: sum(z.square().sum().sqrt() for z in m(x).unbind(0)),
    "some": lambda m, x, y: some(m(x)),
    "mean": lambda m, x, y: torch.stack([z.softmax(0)[0] for z in m(x)]).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_owners_have_adds_up(name: str) -> None:
    same_piecewise(Step(nn.Linear(4, 3).double(), LOSSES[name]), numbers(), 3)


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "two owners": (lambda m, z: z * (z[0] * z[7]), "mul.Tensor at"),
    "all of one": (lambda m, z: z + z[0], "add.Tensor at"),
    "in another order": (lambda m, z: torch.stack([one.exp() for one in z.unbind(0)][::-1]), "at .*at once"),
    "across micro-batches": (lambda m, z: torch.cat([two.exp() for two in torch.split(z, 5)]), "split.Tensor at"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_two_owners_is_refused(name: str) -> None:
    function, says = REFUSED[name]
    with pytest.raises(SbpError, match=f"(?s){says}"):
        run(layers(function), numbers(), 3)


def test_a_loss_without_some_micro_batch_is_refused() -> None:
    with pytest.raises(SbpError, match=r"the loss at \S+:\d+ has nothing of the samples of micro-batch 1"):
        run(Step(nn.Linear(4, 3).double(), lambda m, x, y: m(x).unbind(0)[0].norm()), numbers(), 2)


def test_whether_a_sample_is_so_is_no_result() -> None:
    with pytest.raises(SbpError, match="it is true or false of one sample"):
        run(Step(nn.Linear(4, 3).double(), lambda m, x, y: (m(x).sum(), m(x).unbind(0)[0] > 0)), numbers(), 2)
