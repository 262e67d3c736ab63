"""LoRA on a frozen base in pieces: PEFT's adapters are whole on every rank, the base rests in ZeRO-3.

    python examples/peft_lora.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/peft_lora.py        # four processes, or as many as there are

The model is PEFT's, unchanged. Each rank keeps its part of the base and gathers a layer when it needs it. Adapters
alone have gradients and states; PEFT saves them, and merges them into the base.
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import sbpflow as flow

PLAN = """
grid cpu (data={ranks})
**: data=S(0)                   # ZeRO-3 for the base
**.lora_*.**: data=B            # adapters are whole
input ids <- data=S(0)
"""
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.05, task_type="CAUSAL_LM")


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def loss_fn(model: PeftModel, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def main() -> None:
    model = get_peft_model(base(), LORA)
    plan = PLAN.format(ranks=flow.init().size or 4)
    step = flow.compile(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
    ids = (torch.arange(16)[:, None] + torch.arange(24) * 5) % 64  # sixteen rows that go up by five
    losses = [step(ids).item() for _ in range(50)]
    model.save_pretrained("out/lora")  # one file, which all processes write
    merged = model.merge_and_unload()  # the base with what was learned, in pieces as before
    with torch.no_grad():
        after = flow.compile(merged, loss_fn, placement=step.placement)(ids).item()
        again = loss_fn(PeftModel.from_pretrained(base(), "out/lora"), ids).item()
    if flow.init().rank in (None, 0):
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}; merged {after:.4f}, loaded {again:.4f}")
        print(step.explain().frozen, step.memory_at_rest()[0], sep="\n")


if __name__ == "__main__":
    main()
