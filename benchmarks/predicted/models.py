"""Six models on one device: a step as a cluster file predicts it, beside what it takes, and what eager torch takes.

    python -m sbpflow doctor --measure --save card.toml
    python -m benchmarks.predicted.models card.toml [--device cuda] [--quick] [--only GPT-2 ...]

Prints a line of JSON a model and way, {model: {what: [microseconds of each round]}}. Memory, in GB, is the most that
torch's allocator held in a step.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as of
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.placement.cluster import preset_here

WARM, ROUNDS, STEPS = 2, 3, 5
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its batch, and in which dtype its weights are; those of float32 compute in bf16 by autocast."""

    model: Callable[[bool], Any]  # small or not
    batch: Callable[[bool], Batch]
    dtype: torch.dtype = torch.bfloat16


def words(samples: int, length: int, vocabulary: int) -> Callable[[bool], Batch]:
    def made(small: bool) -> Batch:
        ids = torch.randint(3, 128 if small else vocabulary, (2, 32) if small else (samples, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return made


def images(samples: int, side: int) -> Callable[[bool], Batch]:
    def made(small: bool) -> Batch:
        many = 2 if small else samples
        return {"pixel_values": torch.randn(many, 3, side, side), "labels": torch.arange(many) % 10}

    return made


def llama(small: bool) -> Any:
    own = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
    little = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {"num_key_value_heads": 4, "use_cache": False}
    return of.LlamaForCausalLM(of.LlamaConfig(vocab_size=128 if small else 32000, **(little if small else own), **more))


def gpt2(small: bool) -> Any:
    more: dict[str, Any] = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128} if small else {}
    return of.GPT2LMHeadModel(of.GPT2Config(use_cache=False, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **more))


def bert(small: bool) -> Any:
    little = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {**little, "vocab_size": 128} if small else {}
    return of.BertForMaskedLM(of.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **more))


def vit(small: bool) -> Any:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    little = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return of.ViTForImageClassification(of.ViTConfig(num_labels=10, **(little if small else large)))


def t5(small: bool) -> Any:
    large = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
    little = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    more: dict[str, Any] = {"use_cache": False, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    return of.T5ForConditionalGeneration(of.T5Config(**(little if small else large), **more))


def mixtral(small: bool) -> Any:
    own = {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16}
    little = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {"num_key_value_heads": 4, "num_local_experts": 8, "use_cache": False}
    size = 128 if small else 32000
    return of.MixtralForCausalLM(of.MixtralConfig(vocab_size=size, **(little if small else own), **more))


CASES = {
    "Llama 1.1B": Case(llama, words(4, 2048, 32000)),
    "GPT-2 124M, autocast": Case(gpt2, words(8, 1024, 50257), torch.float32),
    "BERT base, autocast": Case(bert, words(32, 512, 30522), torch.float32),
    "ViT large": Case(vit, images(64, 224)),
    "T5 large": Case(t5, words(8, 512, 32128)),
    "Mixtral 8x0.1B": Case(mixtral, words(4, 2048, 32000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cluster", help="what `doctor --measure` wrote; the preset of a card where there is no such file"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="one small model, without a compiler: whether all runs")
    options = parser.parse_args()
    names, ways = (options.only[:1], ["eager", "code"]) if options.quick else (options.only, options.ways)
    cluster = options.cluster if Path(options.cluster).is_file() else preset_here(options.device).name
    for way in ways:  # those that compile come last
        for name in names:
            try:
                found = measured(CASES[name], way, options.device, cluster, options.quick)
            except Exception as error:  # the others go on
                found = {way: f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            print(json.dumps({name: found}), flush=True)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()


def measured(case: Case, way: str, device: str, cluster: str, small: bool) -> dict[str, list[float] | str]:
    """Microseconds of steps, the most memory they take, and what was predicted of both."""
    torch.manual_seed(0)
    with torch.device(device):
        model = case.model(small).to(case.dtype).train()
        batch = {name: x.to(case.dtype) if x.is_floating_point() else x for name, x in case.batch(small).items()}
    begin = time.perf_counter()
    with flow.use_cluster(cluster):
        call, step = WAYS[way](model, case.dtype == torch.float32, device)
        call(batch)
        first = time.perf_counter() - begin
        told = told_of(way, step) if step is not None else {}
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(WARM):
        call(batch)
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):  # the host may run ahead, as it does in training
            call(batch)
        wait()
        times.append((time.perf_counter() - start) / STEPS * 1e6)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {way: times, f"{way}, first": [first * 1e6], f"{way}, GB": f"{peak / 1e9:.3f}", **told}


def told_of(way: str, step: Any) -> dict[str, list[float] | str]:
    report = step.explain()
    memory = max((one.total for one in report.memory.ranks.values()), default=0) if report.memory else 0
    return {f"{way}, predicted": [report.predicted * 1e6], f"{way}, GB predicted": f"{memory / 1e9:.3f}"}


def loss_of(model: Any, **batch: Tensor) -> Any:
    return model(**batch).loss


def autocast_loss(kind: str) -> Callable[..., Any]:
    def loss(model: Any, **batch: Tensor) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return model(**batch).loss

    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4, fused=True)


def eager(model: nn.Module, autocast: bool, device: str) -> tuple[Callable[[Batch], object], None]:
    optimizer, loss = adamw(model), autocast_loss(device) if autocast else loss_of

    def step(batch: Batch) -> None:
        loss(model, **batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, None


def graph(backend: Any, **options: Any) -> Callable[[nn.Module, bool, str], tuple[Callable[[Batch], object], Any]]:
    def way(model: nn.Module, autocast: bool, device: str) -> tuple[Callable[[Batch], object], Any]:
        loss = autocast_loss(device) if autocast else loss_of
        where = flow.placement(device, [0])
        step = flow.compile(model, loss, adamw(model), placement=where, backend=backend, **options)
        return lambda batch: step(**batch), step

    return way


WAYS: dict[str, Callable[[nn.Module, bool, str], tuple[Callable[[Batch], object], Any]]] = {
    "eager": eager,
    "code": graph("code"),
    "inductor": graph("inductor"),
    "recorded": graph("inductor", cuda_graph=True),
}


if __name__ == "__main__":
    main()
