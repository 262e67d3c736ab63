"""`cuda_graph=True` on a card: replayed steps come to what plain ones do. tests/card has more models, and changes."""

import pytest
import torch

from tests.card.recorded_steps import course, like

ALONE = "grid cuda:[0] as (data=1)"
SHARED = (
    f"grid cuda:[0, {torch.cuda.device_count()}] as (data=2)\n**: data=B\nstates **: data=S(0)"  # ranks share a card
)


@pytest.mark.parametrize("plan", [ALONE, SHARED], ids=["alone", "zero-1"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw fused", "sgd"])
@pytest.mark.parametrize("model", ["transformer", "autocast"])
def test_replayed_steps_come_to_what_plain_ones_do(model: str, optimizer: str, plan: str) -> None:
    mine = course(model, optimizer, plan, graph=True, backend="code", clip_grad_norm=0.5)
    like(mine, course(model, optimizer, plan, graph=False, backend="code", clip_grad_norm=0.5))
    assert mine.step.explain().recorded == "all of the step"


def test_what_a_compiler_made_is_recorded() -> None:
    mine = course("mlp", "adamw fused", ALONE, graph=True)
    like(mine, course("mlp", "adamw fused", ALONE, graph=False))
    assert mine.step.explain().recorded == "all of the step"
