"""Small models of transformers that generate, and what they generate on one device."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import transformers as of
from torch import Tensor

__all__ = ["MODELS", "PLANS", "generated", "model_of", "prompts", "tokens_of"]

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ENCODED: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: of.LlamaForCausalLM(of.LlamaConfig(**_SMALL)),
    "gpt2": lambda: of.GPT2LMHeadModel(
        of.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    ),
    "mistral": lambda: of.MistralForCausalLM(of.MistralConfig(**_SMALL, sliding_window=8)),
    "gemma3": lambda: of.Gemma3ForCausalLM(of.Gemma3TextConfig(**_SMALL, **_WINDOWS)),
    "mixtral": lambda: of.MixtralForCausalLM(of.MixtralConfig(**_SMALL, **_EXPERTS)),
    "mamba": lambda: of.MambaForCausalLM(
        of.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, eos_token_id=2, pad_token_id=0)
    ),
    "qwen3_next": lambda: of.Qwen3NextForCausalLM(of.Qwen3NextConfig(**_SMALL, **_LINEAR)),
    "t5": lambda: of.T5ForConditionalGeneration(
        of.T5Config(**_ENCODED, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
}  # fmt: skip
PLANS = {
    "tensor": "grid (tensor=2)\ntake tp_plan over tensor\n",
    "data": "grid (data=2)\ninput input_ids <- data=S(0)\n",
    "stages": "grid (stage=2)\npipe model.layers over stage by 1f1b, 1 micro-batches\n",
}


def model_of(name: str) -> Any:
    """The model with its seed's weights. One with experts computes in float32, as their grouped products do."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    return model if name in ("mixtral", "qwen3_next") else model.double()


@cache
def prompts(rows: int = 4, tokens: int = 5) -> Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def generated(model: Any) -> dict[str, Tensor]:
    """The tokens generated for four rows of five tokens: at most six more, and twelve where a model takes the best."""
    ids, generate = prompts(), model.generate
    padded = ids.clone()
    padded[0, :2] = 0
    found = {"greedy": generate(ids, max_new_tokens=12, do_sample=False)}
    torch.manual_seed(5)
    found["sampled"] = generate(ids, max_new_tokens=6, do_sample=True, top_k=20)
    found["beams"] = generate(ids[:2], max_new_tokens=6, do_sample=False, num_beams=2)
    found["padded"] = generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=6, do_sample=False)
    return found


@cache
def tokens_of(name: str) -> dict[str, Tensor]:
    """The same by the model of this name on one device."""
    return generated(model_of(name))
