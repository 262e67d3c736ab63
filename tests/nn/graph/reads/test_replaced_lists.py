"""A list that stands in the place of an equal one, such as the adapters that PEFT switches to, needs no capture."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow
from tests.nn.graph.alike import compiled, same

P = flow.placement("cpu", range(2))
X = torch.ones(2, 3)


class Adapted(nn.Module):
    """It goes by the names of a list, and notes others in one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"a": 2.0, "b": 3.0}
        self.active: Any = ["a"]
        self.notes: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        for name in self.active:
            x = x * self.scales[name]
        return x


def run(model: Adapted) -> tuple[Any, Callable[[], None]]:
    graph = flow.compile(model, placement=P)

    def step() -> None:
        with torch.no_grad():
            same(graph(X), model(X))

    return graph, step


def test_names_that_are_switched_to_and_fro_are_captured_once_each() -> None:
    model = Adapted()
    graph, step = run(model)
    guarded = []
    for at in range(8):
        model.active = [["a"], ["b"], ["a", "b"]][at % 3]
        model.active = list(model.active)
        step()
        step()
        guarded.append(len(graph._last.plan.passes.reads))
    assert compiled(graph) == 3
    assert guarded[3:] == guarded[:5]  # and lists that are gone are not read any more


@pytest.mark.parametrize(
    "edit",
    [
        lambda held: held.append("b"),
        lambda held: held.__setitem__(0, "b"),
        lambda held: held.clear(),
    ],
    ids=["longer", "another", "empty"],
)
def test_the_list_that_came_is_followed_and_so_is_one_that_is_held_elsewhere(edit: Callable[[Any], None]) -> None:
    models: Any = nn.ModuleList([Adapted(), Adapted()])
    shared = models[1].active = models[0].active
    model = Adapted()
    model.inner = models

    def forward(x: Tensor) -> Tensor:
        return models[1](models[0](x))  # type: ignore[no-any-return]

    model.forward = forward  # type: ignore[method-assign]
    graph, step = run(model)
    step()
    models[0].active = ["a"]
    step()
    assert compiled(graph) == 1
    edit(shared)
    step()
    edit(models[0].active)
    step()
    assert compiled(graph) == 3


@pytest.mark.parametrize("other", [[1], [1.0], [True], (1,), [[1]]], ids=repr)
def test_only_what_is_equal_in_every_type_stands_for_a_list(other: Any) -> None:
    class Kind(nn.Module):
        given: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return x * len(repr(self.given))

    model = Kind()
    model.given = [1]
    graph = flow.compile(model, placement=P)
    with torch.no_grad():
        graph(X)
        model.given = other
        same(graph(X), model(X))


def test_what_a_program_puts_into_a_list_goes_into_the_one_that_is_there() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[str] = []

        def forward(self, x: Tensor) -> Tensor:
            self.notes.append("called")
            return x * 2

    model = Noting()
    graph = flow.compile(model, placement=P)
    with torch.no_grad():
        for _ in range(3):
            model.notes = []
            graph(X)
            assert model.notes == ["called"]
