"""Parameters that stand in a module instead of those that a step ran with: the step is made anew, or says why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpflow as flow

WHERE = flow.placement("cpu", range(2))


def assigned(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.full((4, 4), 3.0))


def moved(model: nn.Linear) -> None:
    flow.nn.to_global(model, flow.placement("cpu", [1]))
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def loaded(model: nn.Linear) -> None:
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)


def removed(model: nn.Linear) -> None:
    model.bias = None  # type: ignore[assignment]


@pytest.mark.parametrize("change", [assigned, moved, loaded, removed], ids=lambda change: str(change.__name__))
def test_a_step_goes_by_those_that_modules_hold_now(change: Callable[[nn.Linear], None]) -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    graph = flow.compile(model, placement=WHERE)
    with torch.no_grad():
        graph(x)
        change(model)
        found: Any = graph(x)
        values: list[Any] = [value for value in (model.weight, model.bias) if value is not None]
        wanted = nn.functional.linear(x, *(value.full_tensor() for value in values))
        torch.testing.assert_close(found.full_tensor(), wanted)


def test_an_optimizer_that_holds_those_of_before_is_refused() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x).sum()
        return out

    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    step = flow.compile(model, loss, torch.optim.SGD(model.parameters()), placement=WHERE)
    step(x)
    assigned(model)
    with pytest.raises(flow.SbpflowError, match=r"a parameter \(4, 4\) that no module of the graph has"):
        step(x)
