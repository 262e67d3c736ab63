"""Training calls that a graph cannot make are errors with the user's line and a way out."""

# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

import sbpflow as flow
from sbpflow.placement.errors import SbpError
from tests.nn.graph.alike import LINE, batch, loss_fn, net, sgd


def kept(*args: Any) -> None:
    """A hook that changes nothing."""


HOOKS: dict[str, Callable[[Any], Any]] = {
    "full": lambda model: model[1].register_full_backward_hook(kept),
    "of the model": lambda model: model.register_full_backward_hook(kept),
    "pre": lambda model: model[0].register_full_backward_pre_hook(kept),
    "of a kind that modules had before": lambda model: model[1].register_backward_hook(kept),
    "of all modules": lambda model: register_module_full_backward_hook(kept),
}


@pytest.mark.parametrize("late", [False, True], ids=["before", "between"])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_backward_hook_of_a_module_is_refused_where_gradients_are_made(kind: str, late: bool) -> None:
    """torch's own text was "please open an issue"; one of the older kind was never called."""
    model = net()
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    if late:
        step(*batch())
    handle = HOOKS[kind](model)
    try:
        with torch.no_grad():
            flow.compile(model, placement=LINE)(batch()[0])
        with pytest.raises(SbpError, match=r"(?s)^capture: .* backward hook; \w+ is called at .*alike.*remove it"):
            step(*batch())
    finally:
        handle.remove()
    assert torch.isfinite(step(*batch()).full_tensor())


def test_a_hook_of_a_parameter_is_called_at_each_step() -> None:
    model: Any = net()
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda g: seen.append(g))
    step = flow.compile(model, loss_fn, sgd(model), placement=LINE)
    step(*batch())
    step(*batch())
    assert len(seen) == 2


def test_backward_behind_a_step_says_that_the_step_has_made_the_gradients() -> None:
    model = net()
    loss: Any = flow.compile(model, loss_fn, sgd(model), placement=LINE)(*batch())
    with pytest.raises(RuntimeError, match=r"(?s)^backward\(\) of what Sequential returned, at .*leave the call out"):
        loss.backward()


def test_clipping_behind_a_step_says_who_clips() -> None:
    """It returned 0, and the step was made with gradients as they were."""
    model, other = net(), net()
    flow.compile(model, loss_fn, sgd(model), placement=LINE)(*batch())
    with pytest.warns(UserWarning, match=r"clips nothing: Sequential has used up .* clip_grad_norm="):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    flow.compile(other, loss_fn, placement=LINE)(*batch())
    assert nn.utils.clip_grad_norm_(other.parameters(), 1e9) > 0
    assert nn.utils.clip_grad_norm_(net().parameters(), 1.0) == 0
