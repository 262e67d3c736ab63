"""Ten families of transformers on one rank: the first step and a step beside eager torch and torch.compile.

    python -m benchmarks.families [--quick] [--only llama t5 ...] [--write]

Each family has a process of its own. Models are of few narrow layers, so that what is not arithmetic counts. A step is
forward, backward and AdamW; times are those of the processor, in turn, round by round, one thread.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as of
from torch import Tensor, nn

import sbpflow as flow
from benchmarks.parts.alone import Times, aligned
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.processes import launched, worker

ROUNDS, BATCH, LENGTH, WORDS = 15, 4, 32, 256
DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "use_cache": False, "pad_token_id": 0,
}  # fmt: skip
GROUPED = DECODER | {"num_key_value_heads": 2}
IMAGE = {**DECODER, "image_size": 32, "patch_size": 8}
Batch = dict[str, Tensor]
WAYS = {"graph": "graph", "compiled": "torch.compile"}


def words() -> Batch:
    ids = torch.randint(3, WORDS, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def image() -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % 2}


def sound() -> Batch:
    return {"input_features": torch.randn(BATCH, 80, 64), "labels": torch.randint(3, WORDS, (BATCH, 8))}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "llama": (lambda: of.LlamaForCausalLM(of.LlamaConfig(**GROUPED)), words),
    "qwen3": (lambda: of.Qwen3ForCausalLM(of.Qwen3Config(**GROUPED, head_dim=16)), words),
    "gemma3": (lambda: of.Gemma3ForCausalLM(of.Gemma3TextConfig(**GROUPED, head_dim=16)), words),
    "mistral": (lambda: of.MistralForCausalLM(of.MistralConfig(**GROUPED)), words),
    "gpt2": (lambda: of.GPT2LMHeadModel(of.GPT2Config(vocab_size=WORDS, n_embd=64, n_layer=4, n_head=4)), words),
    "mixtral": (lambda: of.MixtralForCausalLM(of.MixtralConfig(**GROUPED, num_local_experts=4)), words),
    "bert": (lambda: of.BertForMaskedLM(of.BertConfig(**DECODER)), words),
    "t5": (
        lambda: of.T5ForConditionalGeneration(
            of.T5Config(vocab_size=WORDS, d_model=64, d_ff=128, num_layers=4, num_heads=4, d_kv=16, use_cache=False,
                        decoder_start_token_id=0)
        ),
        words,
    ),
    "vit": (lambda: of.ViTForImageClassification(of.ViTConfig(**IMAGE)), image),
    "whisper": (
        lambda: of.WhisperForConditionalGeneration(
            of.WhisperConfig(vocab_size=WORDS, d_model=64, encoder_layers=4, decoder_layers=4, encoder_ffn_dim=128,
                             decoder_ffn_dim=128, encoder_attention_heads=4, decoder_attention_heads=4, use_cache=False,
                             max_source_positions=32, max_target_positions=16, pad_token_id=0, bos_token_id=1,
                             eos_token_id=2, decoder_start_token_id=1)
        ),
        sound,
    ),
}  # fmt: skip


def main() -> None:
    options = command_line(__doc__, FAMILIES).parse_args()
    if options.job:
        job = json.loads(options.job)
        worker(job, lambda: timed(job["family"], job["rounds"]))
        return
    rounds = 2 if options.quick else ROUNDS
    names = options.only[:1] if options.quick else options.only
    found = {name: launched("families", 1, {"family": name, "rounds": rounds}) for name in names}
    head = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, transformers {of.__version__}"
    reported("families", [f"{head}, one thread.", "", *show(found)], write=options.write)


def timed(name: str, rounds: int) -> Times:
    """Microseconds of first steps, and of later ones in turn."""
    make, data = FAMILIES[name]
    torch.manual_seed(0)
    batch = data()
    steps = {way: stepped(way, make().train()) for way in ("eager", *WAYS)}
    first = {way: [spent(lambda step=step: step(batch))] for way, step in steps.items()}  # type: ignore[misc]
    for step in steps.values():
        step(batch)
    later: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            later[way].append(spent(lambda step=step: step(batch)))  # type: ignore[misc]
    return {"first": first, "step": later}


def spent(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return (time.process_time() - begin) * 1e6


def loss_of(model: Any, **batch: Tensor) -> Any:
    return model(**batch).loss


def stepped(way: str, model: nn.Module) -> Callable[[Batch], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if way == "graph":
        step = flow.compile(model, loss_of, optimizer, placement=flow.placement("cpu", [0]))
        return lambda batch: step(**batch)
    run: Any = model if way == "eager" else torch.compile(model)

    def plain(batch: Batch) -> None:
        loss_of(run, **batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return plain


def show(found: dict[str, Times]) -> Iterator[str]:
    rows = [["family", "eager step, ms", "graph", "torch.compile", "first step: graph, s", "torch.compile, s"]]
    for name, times in found.items():
        later, first = times["step"], times["first"]
        usual = statistics.median(later["eager"])
        rows.append([
            name, f"{usual / 1e3:.2f}", *(f"{statistics.median(later[way]) / usual:.2f}" for way in WAYS),
            *(f"{first[way][0] / 1e6:.2f}" for way in WAYS),
        ])  # fmt: skip
    yield from aligned(rows)


if __name__ == "__main__":
    main()
