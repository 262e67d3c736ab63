"""`cuda_graph=True`: steps that are recorded as graphs of a card come to what they come to as ever, to the bit."""

from typing import Any

import pytest
import torch

from tests.card.recorded_steps import MODELS, OPTIMIZERS, course, like

ALONE = "grid cuda:[0] as (data=1)"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_replayed_steps_come_to_what_plain_ones_do(model: str, optimizer: str) -> None:
    mine = course(model, optimizer, ALONE, graph=True)
    like(mine, course(model, optimizer, ALONE, graph=False))
    assert mine.step.explain().recorded == "all of the step"


def test_a_fused_step_passes_what_torch_asks_of_it_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own check looks for an accelerator, which a CPU build has not, and has another name in torch 2.11."""

    def check(self: torch.optim.Optimizer) -> None:
        if torch.cuda.is_current_stream_capturing():
            assert all(group["capturable"] for group in self.param_groups)

    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        monkeypatch.setattr(torch.optim.Optimizer, name, check, raising=False)
    mine = course("mlp", "adamw fused", ALONE, graph=True)
    like(mine, course("mlp", "adamw fused", ALONE, graph=False))
    assert mine.step.explain().recorded == "all of the step"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", MODELS)
def test_clipped_steps_come_to_what_plain_ones_do(model: str, optimizer: str) -> None:
    options: dict[str, Any] = {"clip_grad_norm": 0.05}
    mine = course(model, optimizer, ALONE, graph=True, **options)
    like(mine, course(model, optimizer, ALONE, graph=False, **options))
    assert mine.step.explain().recorded == "all of the step"


def one_card(axes: str) -> str:
    """A grid of two ranks that share the first card."""
    return f"grid cuda:[0, {torch.cuda.device_count()}] as ({axes})"


PLANS = {
    "data": one_card("data=2"),
    "zero-1": one_card("data=2") + "\n**: data=B\nstates **: data=S(0)",
    "zero-3": one_card("data=2") + "\n**: data=S(0)",
    "tensor": one_card("tensor=2") + "\n0: tensor=S(0)",
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("model", ["mlp", "convolutions"])
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_that_share_a_card_are_recorded_with_their_moves(plan: str, model: str, optimizer: str) -> None:
    mine = course(model, optimizer, PLANS[plan], graph=True)
    like(mine, course(model, optimizer, PLANS[plan], graph=False))
    assert mine.step.explain().recorded == "all of the step"
