"""Trials of parts at capture: what no graph could do with a part is refused, with its line."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import LINE, batch, loss_fn, net, sgd


def refused(part: Any, said: str, loss: Any = None) -> None:
    """The error of a step with this part."""
    run = loss or (lambda model, x, y: part(model(x)).mean())
    with pytest.raises(SbpError) as told:
        flow.compile(net(), run, placement=LINE)(*batch())
    assert re.match(rf"capture: the eager part \S+, called at .*test_eager_trial.py:\d+, {said}", str(told.value))


def test_sizes_that_depend_on_values() -> None:
    def positive(z: Tensor) -> Tensor:
        return z[z > 0]

    refused(flow.nn.eager(positive), r"gives back other sizes for other values: \(24,\) and \(0,\)\n.*pad")


def test_a_tensor_of_the_callers_that_is_written_to() -> None:
    def doubled(z: Tensor) -> Tensor:
        return z.mul_(2)

    refused(flow.nn.eager(doubled), "writes to a tensor that it is given\n  have it return a new tensor")


def test_a_list_of_the_callers_that_is_changed() -> None:
    part = flow.nn.eager(lambda z, kept: kept.append(z) or z * 2)
    refused(part, "changes a list or object", lambda model, x, y: part(model(x), []).mean())


def test_nothing_that_comes_back() -> None:
    part = flow.nn.eager(lambda z: None)
    refused(part, "gives back no tensor", lambda model, x, y: (part(model(x)), model(x).mean())[1])


@pytest.mark.parametrize("looks", [True, False], ids=["at values", "at none"])
def test_a_weight_that_a_part_is_not_given(looks: bool) -> None:
    model = net()

    @flow.nn.eager
    def head(z: Tensor, y: Tensor) -> Tensor:
        z = model[2](z)
        return F.cross_entropy(z[y > 0], y[y > 0]) if looks else F.cross_entropy(z, y)

    with pytest.raises(SbpError, match=r"uses a tensor \(3, 8\) of a module that it is not given\n.*flow.nn.eager"):
        flow.compile(model, lambda m, x, y: head(m[:2](x), y), sgd(model), placement=LINE)(*batch())


def test_one_that_fails_says_why() -> None:
    def part(z: Tensor) -> Tensor:
        raise ValueError("no such thing")

    refused(flow.nn.eager(part), "could not be tried.*\n  ValueError: no such thing")


def test_a_trial_leaves_no_trace() -> None:
    seen: list[int] = []

    class Seen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.noted = 0, list[float]()

        def forward(self, z: Tensor) -> Tensor:
            self.calls += 1
            self.noted.append(z.sum().item() + torch.rand(()).item())
            seen.append(len(self.noted))
            return z * 2

    model = torch.nn.Sequential(net(), flow.nn.eager(Seen()))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    flow.compile(model, loss_fn, sgd(model), placement=LINE).plan_for(*batch())
    part: Any = model[1]
    assert (part.calls, part.noted, torch.equal(before, torch.get_rng_state())) == (0, [], True)
    assert seen  # it was run


def test_what_cannot_be_captured_says_how_to_mark_it() -> None:
    class Odd(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z * 2 if z.sum() > 0 else z

    model = torch.nn.Sequential(net(), torch.nn.Sequential(Odd()))
    with pytest.raises(SbpError, match=r"flow\.nn\.eager\(model\[1\]\[0\]\), or in a plan: inside 1\.0 run eager"):
        flow.compile(model, loss_fn, sgd(model), placement=LINE)(*batch())
    flow.nn.eager(model[1][0])  # type: ignore[index]
    flow.compile(model, loss_fn, sgd(model), placement=LINE)(*batch())
