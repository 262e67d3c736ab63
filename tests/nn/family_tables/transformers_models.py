"""Families of transformers that read words: what each is loaded by, and what its config says besides `SMALL`."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.nn.family_tables.family import CLASSES, IMAGE, Family

__all__ = ["ENDS", "HALVED_KEYS", "SMALL", "VOCABULARY", "WORDS", "model"]

VOCABULARY = 64
SMALL = {  # of each the config takes what it knows
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 32, "num_labels": CLASSES,
    "image_size": IMAGE, "patch_size": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the usual ones lie outside of a vocabulary as small
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "experts_implementation": "batched_mm",
}
HALVED_KEYS = {  # one part of a key turns with its place, the other comes from few numbers for all heads
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
SCAN = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8,
}  # fmt: skip

Batch = Callable[[int, int], dict[str, Tensor]]


def words(rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def sentences(rows: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (rows, length))
    return {"input_ids": tokens, "labels": torch.randint(CLASSES, (rows,))}


def model(
    auto: str,
    batch: Batch,
    sizes: Mapping[str, Any] | None = None,
    otherwise: Mapping[str, Any] | None = None,
    *,
    kind: str = "",
    usual: tuple[str, ...] = (),
    eagerly: tuple[str, str] | None = None,
) -> Callable[[str], Family]:
    """The maker of the family of a name: `kind`, or the name itself, is the `model_type` of its config. Sizes may have
    configs in configs; of what `usual` names, the config keeps its own."""

    def family(name: str) -> Family:
        def make(small: Mapping[str, Any]) -> nn.Module:
            hub: Any = importlib.import_module("transformers")
            first = hub.AutoConfig.for_model(kind or name)
            asked = {**SMALL, **small}
            known = {key: value for key, value in asked.items() if hasattr(first, key) and key not in usual}
            config = hub.AutoConfig.for_model(
                kind or name, **(known | ENDS | {**(sizes or {})} | {**small.get("said", {})})
            )
            made = getattr(hub, auto)
            built: nn.Module = made.from_config(config) if hasattr(made, "from_config") else made(config)
            return built

        return Family("transformers", make, batch, otherwise=dict(otherwise or {}), eagerly=eagerly)

    return family


CAUSAL, SENTENCE, PAIR = (
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSeq2SeqLM",
)


def causal(**sizes: Any) -> Callable[[str], Family]:
    return model(CAUSAL, words, sizes)


def sentence(**sizes: Any) -> Callable[[str], Family]:
    return model(SENTENCE, sentences, sizes)


def pair(**sizes: Any) -> Callable[[str], Family]:
    return model(PAIR, words, sizes)


MAKERS = {
    **{name: causal() for name in (
        "arcee", "biogpt", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2",
        "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "llama", "mistral",
        "modernbert-decoder", "mpt", "nemotron", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3", "qwen2",
        "qwen3",
        "smollm3", "stablelm", "starcoder2",
    )},
    "mamba": causal(time_step_rank=4),
    "recurrent_gemma": causal(num_hidden_layers=3),
    "mixtral": causal(num_local_experts=4, experts_implementation="batched_mm"),
    "deepseek_v3": causal(
        **EXPERTS, **HALVED_KEYS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
    "gpt_oss": causal(**EXPERTS, num_local_experts=4, head_dim=8),
    "olmoe": causal(**EXPERTS),
    "qwen2_moe": causal(**EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": causal(**EXPERTS),
    "granitemoe": causal(num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm"),
    "phimoe": causal(num_local_experts=4, experts_implementation="batched_mm"),
    "glm4_moe": causal(**EXPERTS, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=8),
    "llama4_text": causal(
        num_local_experts=4, num_experts_per_tok=1, head_dim=8, intermediate_size_mlp=64, attention_chunk_size=8,
        interleave_moe_layer_step=2,
    ),
    "minimax": causal(
        num_local_experts=4, head_dim=8, block_size=4, experts_implementation="batched_mm",
        layer_types=["full_attention", "linear_attention"],
    ),
    "qwen3_next": causal(
        **EXPERTS, **LINEAR, shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"]
    ),
    "jamba": causal(
        num_experts=2, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, experts_implementation="batched_mm",
    ),
    "mamba2": causal(num_heads=4, head_dim=16, state_size=8, n_groups=1, chunk_size=8),
    "falcon_h1": causal(**SCAN, mamba_d_ssm=64),
    "bamba": causal(**SCAN, attn_layer_indices=[1]),
    "zamba2": causal(
        **{"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 4, "chunk_size": 8},
        layers_block_type=["mamba", "hybrid"], num_mem_blocks=1, hybrid_layer_ids=[1], use_mem_rope=False,
    ),
    "gptj": causal(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32),
    "codegen": causal(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=32),
    "gpt_neo": causal(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    "ctrl": causal(n_embd=32, n_layer=2, n_head=4, dff=64, n_positions=32),
    "xlnet": model(CAUSAL, words, {"n_layer": 2, "n_head": 4, "d_inner": 64, "d_model": 32},
        usual=("max_position_embeddings",)),
    "bert": sentence(),
    "albert": model(SENTENCE, sentences, {"embedding_size": 16}, {"num_hidden_groups": 2}),
    "deberta-v2": model(
        SENTENCE,
        sentences,
        {},
        {"problem_type": "single_label_classification"},
        eagerly=("", "the forward of the whole model picks the samples that have a label by `nonzero`"),
    ),
    "distilbert": sentence(dim=32, n_layers=2, n_heads=4, hidden_dim=64),
    "electra": sentence(embedding_size=16),
    "roberta": sentence(),
    "big_bird": sentence(attention_type="original_full"),
    "fnet": sentence(),
    "modernbert": sentence(local_attention=4),
    "bart": pair(),
    "pegasus": pair(),
    "marian": pair(decoder_start_token_id=0),
    "mbart": pair(),
    "t5": pair(d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "longt5": pair(d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, local_radius=4),
}  # fmt: skip
WORDS = {name: make(name) for name, make in MAKERS.items()}
