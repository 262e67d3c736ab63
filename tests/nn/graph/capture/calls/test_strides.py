"""as_strided in graphs: places in one device's memory, or an error that names the line and what to write."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from tests.nn.graph.alike import F64, same
from tests.nn.graph.test_bad_input import refused
from tests.nn.graph.test_memory_order import ONE, TWO

PAIR = flow.placement("cpu", range(2))
WAYS: list[dict[str, Any]] = [{"placement": ONE}, {"plan": TWO}]
ACROSS: list[dict[str, Any]] = [{"placement": ONE}, {"placement": PAIR, "inputs": {"x": S(0)}}]
HERE = r"called at \S*test_strides.py:\d+"


class Strided(nn.Module):
    """A function of what lies row by row, or turned."""

    def __init__(self, function: Callable[[Tensor], Tensor], turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.function = nn.Parameter(torch.randn(4, 6, dtype=F64)), function
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        y = self.w * x
        return self.function(y.T.contiguous().T if self.turned else y).square().sum()


def whole_and_gradient(function: Callable[[Tensor], Tensor], turned: bool, how: dict[str, Any] | None) -> list[Any]:
    model, x = Strided(function, turned), torch.linspace(-1, 2, 24, dtype=F64).view(4, 6)
    if how is None:
        loss = model(x)
        loss.backward()
        return [loss, model.w.grad]
    loss = flow.compile(model, lambda m, x: m(x), **how)(x)
    return [loss, model.w.grad]


def then_written(y: Tensor) -> Tensor:
    z = y * 1
    part = z.as_strided((4,), (5,))
    z.mul_(2)
    return part


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "its own strides": lambda y: y.as_strided(y.shape, y.stride()) * y,
    "places": lambda y: y.as_strided((3,), (7,), 2),
    "windows": lambda y: y.flatten().as_strided((5, 6), (4, 1)),
    "a part of a part": lambda y: y.flatten()[3:].as_strided((2, 3), (1, 4)),
    "turned": lambda y: y.T.as_strided((2, 3), (1, 4), 5),
    "a copy": lambda y: torch.as_strided_copy(y.T, (3, 4), (1, 2)),
    "beside, without a gradient": lambda y: y * y.detach()[1:3].as_strided((), (), 0),
    "between, without a gradient": lambda y: y.sum() + y.detach()[:, ::2].as_strided((4, 5), (1, 4)),
    "channels last": lambda y: y.view(2, 3, 2, 2).to(memory_format=torch.channels_last).as_strided((3,), (7,), 2),
    "written later": then_written,
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("how", WAYS, ids=["one", "data"])
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_as_strided_takes_places_in_the_memory_of_one_device(name: str, how: dict[str, Any], turned: bool) -> None:
    if name == "channels last" and turned:
        pytest.skip("torch has no such view")
    mine, one = (whole_and_gradient(RIGHT[name], turned, each) for each in (how, None))
    for a, b in zip(mine, one, strict=True):
        same(a, b)


@pytest.mark.parametrize("how", WAYS, ids=["one", "data"])
def test_a_scatter_by_strides_has_the_gradient_of_a_scatter_by_numbers(how: dict[str, Any]) -> None:
    """torch's own gradient of as_strided_scatter fails its check of gradients."""
    places = torch.arange(24).as_strided((2, 3), (7, 2), 1).flatten()

    def by_strides(y: Tensor) -> Tensor:
        return y.as_strided_scatter(y[:2, :3] * 2, (2, 3), (7, 2), 1)

    def by_numbers(y: Tensor) -> Tensor:
        return y.flatten().scatter(0, places, (y[:2, :3] * 2).flatten())

    mine, one = whole_and_gradient(by_strides, False, how), whole_and_gradient(by_numbers, False, None)
    for a, b in zip(mine, one, strict=True):
        same(a, b)


def in_place(y: Tensor) -> Tensor:
    z = (y * 2).T
    return z.as_strided_((3, 4), (4, 1))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "beside": (lambda y: y[1:3].as_strided((2, 2), (1, 3), 0), "reads beside the tensor, where its gradient"),
    "in place": (in_place, "makes a tensor another view of memory that does not lie row by row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_piece_can_be_right_for_is_refused_with_the_line_and_another_way(name: str) -> None:
    function, said = REFUSED[name]
    refused(
        rf"as_strided\S* of a tensor .* {said}[^\n]*\n  {HERE}\n  index instead, as in",
        lambda: whole_and_gradient(function, False, {"plan": TWO}),
    )


def test_the_way_out_that_an_error_names_is_right() -> None:
    wanted = whole_and_gradient(lambda y: y.as_strided((2, 2), (1, 3)), False, None)
    for mine in (
        lambda y: y.flatten()[[0, 3, 1, 4]].view(2, 2),
        lambda y: y.T.T.contiguous().as_strided((2, 2), (1, 3)),
    ):
        for a, b in zip(whole_and_gradient(mine, False, {"plan": TWO}), wanted, strict=True):
            same(a, b)


def beside(model: nn.Linear, x: Tensor) -> Tensor:
    return x.as_strided((2,), (1,), 0).sum() * model.weight.sum()


@pytest.mark.parametrize("cut", [lambda x: x[:, ::2], lambda x: x[1:]], ids=["gaps", "a start"])
def test_memory_around_an_argument_is_not_read(cut: Callable[[Tensor], Tensor]) -> None:
    """It is not what the step was given, and lies on one device alone."""
    x, model = torch.arange(24.0).view(4, 6), nn.Linear(3, 1)
    same(flow.compile(copy.deepcopy(model), beside, placement=ONE)(x), beside(model, x))
    step = flow.compile(model, beside, placement=ONE)
    refused(r"nor of a captured one that it is a view of\n  " + HERE, lambda: step(cut(x)))


def by_number(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x.as_strided((2, 3), (1, 2), 0))
    return made


def by_offset(model: nn.Module, x: Tensor) -> Tensor:
    made: Tensor = model(x) + x.storage_offset()
    return made


@pytest.mark.parametrize("function", [by_number, by_offset])
def test_a_later_argument_that_starts_within_larger_memory_is_no_whole_one(function: Callable[..., Tensor]) -> None:
    memory = torch.arange(48.0).view(8, 6)
    step = flow.compile(nn.Identity(), function, placement=ONE)
    with torch.no_grad():
        for _ in range(2):
            same(step(memory[:4].clone()), function(nn.Identity(), memory[:4].clone()))
            refused(r"(capture: storage_offset\(\)|nor of a captured one)", lambda: step(memory[4:]))
    assert sum(map(len, step._steps.values())) == 1


CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "contiguous": lambda x: x.contiguous().mul_(2),
    "reshape": lambda x: x.reshape(-1).add_(1),
    "a part": lambda x: x[1:].contiguous().add_(1),
    "turned": lambda x: x.T.contiguous().add_(1),
    "its strides": lambda x: x + torch.tensor([*x.stride(), x.is_contiguous()]).sum(),
}
GAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1::2],
    "columns": lambda x: x[:, :-1],
    "inner": lambda x: x[2:6, 1:4],
    "expanded": lambda x: x[0].expand(4, 6),
    "turned": lambda x: x.T[1:3],
}


@pytest.mark.parametrize("cut", GAPS.values(), ids=list(GAPS))
@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("how", ACROSS, ids=["one", "data"])
def test_an_argument_with_gaps_is_copied_where_torch_copies_it(
    name: str, cut: Callable[[Tensor], Tensor], how: dict[str, Any]
) -> None:
    """Tokens of a longer row, `x[:, :-1]`, were written to by what was made of their `contiguous()`."""
    made = [cut(torch.arange(48.0).view(8, 6)) for _ in range(2)]
    step = flow.compile(nn.Identity(), lambda model, x: CHANGED[name](model(x)), **how)
    with torch.no_grad():
        same(step(made[0]), CHANGED[name](made[1]))
    same(made[0], made[1])
