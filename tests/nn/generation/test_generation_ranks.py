"""Generation on real ranks: each picks the same tokens, those of one device."""

import pytest
import torch

import sbpflow as flow
from tests.ranks import Ranks

from .models import model_of, prompts, tokens_of

STAGES = "pipe model.layers over stage by 1f1b, {} micro-batches\n"
PLANS = {
    "tensor": "grid (tensor=4)\ntake tp_plan over tensor\n",
    "rows": "grid (data=2, tensor=2)\ntake tp_plan over tensor\ninput input_ids <- data=S(0)\n",
    "stages": f"grid (stage=2, tensor=2)\ntake tp_plan over tensor\n{STAGES.format(1)}",
    "pieces": f"grid (stage=2, data=2)\n{STAGES.format(2)}",
}


def generates(plan: str) -> tuple[bool, int]:
    """Whether the tokens are right, greedy and sampled, and by how many steps."""
    model, wanted = model_of("llama"), tokens_of("llama")
    with flow.nn.generation(flow.compile(model, plan=plan), max_length=20) as steps:
        found = model.generate(prompts(), max_new_tokens=12, do_sample=False)
        torch.manual_seed(5)
        drawn = model.generate(prompts(), max_new_tokens=6, do_sample=True, top_k=20)
        return torch.equal(found, wanted["greedy"]) and torch.equal(drawn, wanted["sampled"]), steps.captures


@pytest.mark.sampled(1)
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_generate_the_tokens_of_one_device(ranks4: Ranks, plan: str) -> None:
    assert ranks4(generates, PLANS[plan], timeout=240.0) == [(True, 2)] * 4
