"""A checkpoint of any plan goes on in any other: weights and states are the same to the bit, and the next step is."""

from itertools import product
from pathlib import Path

import pytest
import torch

import sbpflow as flow
from tests.grids import with_all_pairs
from tests.nn.checkpoint import plans
from tests.nn.graph import pipes


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "before", "after"), with_all_pairs(product(["gpt", "llama"], plans.NAMES, plans.NAMES))
)
def test_a_run_goes_on_in_another_plan(tmp_path: Path, kind: str, before: str, after: str) -> None:
    model = plans.made(kind)
    optimizer = pipes.adamw(model)
    step = plans.step_of(model, optimizer, before, kind)
    for at in range(2):
        step(*plans.batch(at))
    flow.save(tmp_path / "step-2", model, optimizer=optimizer, plan=step, step=2)
    held, kept = plans.weights(model), plans.states(model, optimizer)
    fresh = plans.made(kind, meta=True)
    optimizer2 = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    flow.load(tmp_path / "step-2", fresh, optimizer=optimizer2)
    assert optimizer2.param_groups[0]["lr"] == 1e-2
    step2 = plans.step_of(fresh, optimizer2, after, kind)
    step2.plan_for(*plans.batch(2)).planned.prepare()
    plans.same(plans.weights(fresh), held)
    plans.same(plans.states(fresh, optimizer2), kept)
    near, far = (
        (1e-9, 1e-7) if kind == "gpt" else (1e-6, 1e-4)
    )  # Llama's loss is one of float32 whatever its weights are
    torch.testing.assert_close(float(step2(*plans.batch(2))), float(step(*plans.batch(2))), rtol=near, atol=0)
    trained = plans.weights(model)
    for name, value in plans.weights(fresh).items():
        torch.testing.assert_close(value, trained[name], rtol=far, atol=far)
