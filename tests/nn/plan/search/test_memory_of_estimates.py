"""Memory of estimates: what is told of a choice from three layers is what the account says of all of them."""

from typing import Any

import pytest
import torch
from torch import nn

import sbpflow as flow
from sbpflow.nn.plan.check import priced_by, stepped
from sbpflow.nn.plan.search.estimates.blocks_again import BlocksAgain
from sbpflow.nn.plan.search.estimates.degrees import Degrees, Pipeline
from sbpflow.nn.plan.search.open_degrees import space_of
from sbpflow.nn.plan.search.seeking import Seeking
from sbpflow.nn.plan.search.trying import Trying

transformers = pytest.importorskip("transformers")

LAYERS, SAMPLES, LENGTH = 8, 64, 2048
SIZES = {"hidden_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "vocab_size": 16384}
PLAN = "cast ** to bf16\ncast {grads,states} ** to fp32\nseek pipe, data, tensor, micro-batches, schedule, recompute"


def made(name: str) -> nn.Module:
    t: Any = transformers
    more = {"num_key_value_heads": 8, "intermediate_size": 5632}
    with torch.device("meta"):
        if name == "dense":
            return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **more))  # type: ignore[no-any-return]
        if name == "mixtral":
            sizes = {**SIZES, **more, "num_local_experts": 8, "sliding_window": None}
            return t.MixtralForCausalLM(t.MixtralConfig(**sizes))  # type: ignore[no-any-return]
        heads = {
            "num_key_value_heads": 16,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        }
        mixture = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
        sizes = {**SIZES, **more, **heads, **mixture, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
        return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**sizes))  # type: ignore[no-any-return]


WAYS = {
    "1f1b": Degrees(4, 1, 2, 64),
    "zb_h1": Degrees(4, 1, 2, 64, Pipeline("zb_h1")),
    "zb_v": Degrees(2, 1, 4, 64, Pipeline("zb_v", 2)),
    "interleaved": Degrees(4, 1, 2, 64, Pipeline("interleaved", 2), again=BlocksAgain(whole=1)),
    "one stage": Degrees(1, 1, 8, 64),
    "one stage, run again": Degrees(1, 1, 8, 64, again=BlocksAgain(whole=1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dense", "mixtral", "deepseek"])
@pytest.mark.parametrize("way", WAYS)
def test_an_estimate_is_within_some_percent_of_the_account(name: str, way: str) -> None:
    model, words = made(name), torch.zeros(SAMPLES, LENGTH, dtype=torch.long, device="meta")
    batch = {"input_ids": words, "labels": words}
    with priced_by("h100x8"):
        space = space_of(flow.Plan.read(PLAN), model, SAMPLES, "cuda", 8, 8, LENGTH)
        seeking = Seeking(space, Trying(model, batch, None, None, 8, None), str, loss_fn=None, optimizers=[])
        at = WAYS[way]
        seeking.add([at])
        _, checked = stepped(flow.Plan.read(space.text(at)), model, batch, ranks=8)
    assert seeking.found[at].memory == pytest.approx(checked.memory, rel=0.03)
