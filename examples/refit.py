"""Trains on ranks 0-3 and generates on ranks 4-5: after every step the new weights go from the one model to the other.

    python examples/refit.py                             # one process plays six ranks
    torchrun --nproc-per-node 6 examples/refit.py        # six processes
    python examples/refit.py --check                     # also compares the weights of the two

A small Llama writes, is told how often it wrote one letter, and learns to write it more often (REINFORCE). The trainer
has its weights in pieces, in fp32, the writer all of them on each rank, in bf16.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, logging

import sbpflow as flow

TRAINERS, WRITERS = range(4), flow.placement("cpu:[4-5]")
PLAN = f"""
grid cpu:[{TRAINERS[0]}-{TRAINERS[-1]}] as (data=4)
**: data=S(0)                                  # ZeRO-3
"""
LETTERS, LIKED, PROMPT, NEW, ROWS, STEPS = 12, 7, 2, 6, 32, 9


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def surprise(model: LlamaForCausalLM, texts: Tensor, weight: Tensor) -> Tensor:
    """How unlikely the texts were, each counted by how much better than the others it was."""
    logits = model(input_ids=texts[:, :-1], use_cache=False).logits
    of_each = F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten(), reduction="none")
    return (of_each.view(texts.shape[0], -1).mean(1) * weight).mean()


def written(writer: LlamaForCausalLM, seed: int) -> Tensor:
    """The texts that the writer makes of random beginnings: all rows on every process."""
    torch.manual_seed(seed)
    prompt = torch.randint(LETTERS, (ROWS, PROMPT))
    prompt = flow.tensor(prompt, placement=WRITERS, sbp=flow.S(0))
    with torch.no_grad():
        texts = writer.generate(prompt, max_new_tokens=NEW, do_sample=True, pad_token_id=0)
    return texts.full_tensor()  # type: ignore[no-any-return]


def main() -> None:
    logging.set_verbosity_error()
    trainer, writer = llama(), flow.nn.to_global(llama().to(torch.bfloat16), WRITERS).eval()
    step = flow.compile(trainer, surprise, torch.optim.AdamW(trainer.parameters(), lr=2e-2), plan=PLAN)
    first = 0 in flow.boxing.owned(flow.placement("cpu:[0]"))
    liked = []
    for at in range(STEPS):
        texts = written(writer, seed=at)
        reward = (texts[:, PROMPT:] == LIKED).float().mean(1)
        liked.append(reward.mean().item())
        step(texts, (reward - reward.mean()) / (reward.std() + 1e-6))
        report = flow.refit(trainer, writer)
        if first and at % 3 == 0:
            print(f"step {at:2}  wrote {liked[-1]:.2f} of letter {LIKED}; {report}")
    if first:
        print(f"letter {LIKED}: {liked[0]:.0%} of the first texts, {liked[-1]:.0%} of the last")
    if "--check" in sys.argv:
        for x, y in zip(trainer.parameters(), writer.parameters(), strict=True):
            apart = (x.full_tensor().to(torch.bfloat16) - y.full_tensor()).abs().max().item()
            if apart:
                sys.exit(f"a weight of {tuple(x.shape)} is {apart} apart")
        if first:
            print("all weights are the trainer's")


if __name__ == "__main__":
    main()
