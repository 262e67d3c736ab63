"""Mixtures of experts of transformers under expert plans, beside one device.

python -m tests.nn.plan.expert_plans              # what becomes of each, and docs/evidence/expert_plans.md anew
python -m tests.nn.plan.expert_plans mixtral      # of these alone
"""

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sbpflow as flow
from tests.nn.families import RIGHT, losses_of, make_page, plain, rows_of
from tests.nn.family_tables.transformers_models import ENDS, HALVED_KEYS, SMALL, VOCABULARY
from tests.nn.mixtures.left_out import limited
from tests.nn.plan.families import MOMENTUM, OFF, STEPS, apart, compiled

__all__ = ["MIXTURES", "PAGE", "PLANS", "outcome"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "expert_plans.md"
EXPERTS, FACTOR, ROWS, LENGTH = 8, 1.25, 8, 5
COUNTS: dict[str, Any] = {
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 8, "max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {  # what a config says besides `SMALL` and `COUNTS`
    "deepseek_v3": HALVED_KEYS,
    "flex_olmo": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "llama4_text": {"intermediate_size_mlp": 64, "num_experts_per_tok": 1},
    "minimax": {"num_hidden_layers": 4},  # every other layer is like another
    "minimax_m2": {},
    "mixtral": {"output_router_logits": True},  # an auxiliary loss, of how tokens are shared out
    "olmoe": {},
    "qwen2_moe": {},
    "phimoe": {},
    "qwen3_moe": {},
    "qwen3_next": LINEAR,
    "solar_open": {},
}
EXPECT = """
expect 2 all_to_all over {axis} a layer forward
expect 2 all_to_all over {axis} a layer backward"""
FOLDED = """grid (data=4, expert=4 folds data)
input * <- data=S(0)
**.experts.*: expert=S(0)
states **: data=S(0)
inside **.experts use {use} over expert""" + EXPECT.format(axis="expert")
PLANS = {
    "dropless": """grid (expert=4)
input * <- expert=S(0)
**.experts.*: expert=S(0)
inside **.experts use dropless over expert"""
    + EXPECT.format(axis="expert"),
    "dropless, ZeRO-1": FOLDED.format(use="dropless"),
    "capacity, ZeRO-1": FOLDED.format(use=f"capacity({FACTOR})"),
    "data x expert": """grid (data=2, expert=2)
input * <- data=S(0), expert=S(0)
**.experts.*: expert=S(0)
inside **.experts use dropless over expert"""
    + EXPECT.format(axis="expert"),
}


def made(name: str) -> Any:
    """A model in float64 whose experts are looped over, as in no other form they take it."""
    hub: Any = importlib.import_module("transformers")
    usual = hub.AutoConfig.for_model(name)
    known = {key: value for key, value in {**SMALL, **COUNTS}.items() if hasattr(usual, key)}
    torch.manual_seed(0)
    model = hub.AutoModelForCausalLM.from_config(hub.AutoConfig.for_model(name, **known | ENDS | MIXTURES[name]))
    model.set_experts_implementation("eager")
    return model.double().train()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def outcome(name: str, plan: str) -> str:
    """`right`, or the first line of the error. A wrong value raises."""
    model = made(name)
    one, before = copy.deepcopy(model), copy.deepcopy(model)
    if "capacity" in plan:
        limited(one, EXPERTS, FACTOR, 4)
    batches = [batch() for _ in range(STEPS)]
    wanted = losses_of(plain(one, momentum=MOMENTUM), batches)
    try:
        losses = losses_of(compiled(model, PLANS[plan]), batches)
    except flow.SbpflowError as error:
        return str(error).splitlines()[0]
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, wanted, strict=True)), f"{losses} for {wanted}"
    off = {path: by for path, by in apart(model, one, before).items() if not by < OFF}
    assert not off, f"these change by so much of themselves more or less than on one device: {off}"
    return RIGHT


TOP = """# Expert plans

Mixtures of experts of {count} families, as transformers {version} has them and nobody changed them, tiny and with
random weights in float64, under {plans} [plans](../plans.md) that [send
tokens](systems/experts.md#experts-of-models-that-nobody-changed): {experts} experts, of which each token chooses
two. Each is trained for {steps} steps of SGD with momentum. Losses, and what every tensor changes by, hence the
gradients of routers too, are held to those of one device, which leaves out the same choices where a plan says
`capacity`; and every `expect` line holds. Batches have {rows} x {length} tokens: where ranks have unequally many
samples, tokens are shared out evenly by moves that an `expect` line would count. `make test` runs a sample,
`make sweep` one plan of each family and `make rest` all others, and hold them to this page, which is generated:

```sh
python -m tests.nn.plan.expert_plans
```

"""


def page(found: dict[tuple[str, str], str]) -> str:
    hub: Any = importlib.import_module("transformers")
    sizes = {"experts": EXPERTS, "steps": STEPS, "rows": ROWS, "length": LENGTH}
    top = TOP.format(count=len(MIXTURES), version=hub.__version__, plans=len(PLANS), **sizes)
    top += "".join(f"**{name}**\n\n```text\n{plan}\n```\n\n" for name, plan in PLANS.items())
    return top + rows_of(found, list(MIXTURES), PLANS)


if __name__ == "__main__":
    make_page(__doc__, MIXTURES, PLANS, outcome, page, PAGE)
