"""The time and memory of finding a plan for a model on meta and a described cluster, in its grid or of all degrees."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["CASES", "CLUSTERS", "DEGREES", "MODELS", "degrees_rows", "found_rows"]

CLUSTERS = ("h100x8", "h100x8*2", "h100x8*16", "h100x8*128")
MODELS = ("gpt2-medium", "llama-7b", "mixtral-8x7b", "t5-large")
CASES = [(model, cluster, 0) for cluster in CLUSTERS for model in MODELS] + [("llama-7b", "h100x8", 60)]
COLUMNS = ("model", "cluster", "limit, GiB", "processor s", "wall s", "process GiB", "plans", "step", "gap", "answer")
CAST = "cast ** to bf16\ncast {grads,states} ** to fp32"
DEGREES: tuple[tuple[str, int, int], ...] = (  # model, cards, samples of a batch
    ("llama-3-8b", 8, 64),
    ("llama-3-8b", 64, 512),
    ("vit-huge", 8, 128),
    ("vit-huge", 64, 1024),
    ("t5-large", 8, 128),
    ("t5-large", 64, 1024),
    ("llama-3-405b", 16384, 2048),
    ("gpt-3-175b", 1024, 1536),
    ("mixtral-8x7b", 8, 64),
    ("mixtral-8x7b", 64, 512),
    ("qwen3-30b-a3b", 8, 64),
    ("qwen3-30b-a3b", 64, 512),
    ("deepseek-v3", 2048, 16384),
)
PUBLISHED = {
    "gpt-3-175b": "grid cuda (pipe=8, data=16, tensor=8)",
    "llama-3-405b": "grid cuda (pipe=16, data=128, tensor=8)",
}
DEGREE_COLUMNS = (
    "model",
    "cards",
    "batch",
    "processor s",
    "wall s",
    "process GiB",
    "step",
    "memory, GiB",
    "published",
    "plan",
)


def found_rows(cases: Iterable[tuple[str, str, int]]) -> Iterator[tuple[str, ...]]:
    """A row a case, with what the columns are."""
    yield COLUMNS
    yield from _told("plans", cases)


def degrees_rows(cases: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, ...]]:
    """A row a case, with what the columns are. `published` is the step with a published grid, as many times that of
    the answer, where everything else is looked for."""
    yield DEGREE_COLUMNS
    yield from _told("degrees", cases)


def _told(what: str, cases: Iterable[tuple[object, ...]]) -> Iterator[tuple[str, ...]]:
    """The row of each case, which a process of its own tells."""
    for case in cases:
        command = [sys.executable, "-m", "benchmarks.parts.found_plans", what, *map(str, case)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        row = said.strip().splitlines()[-1]
        print(row, file=sys.stderr, flush=True)
        yield tuple(row.split("|"))


def _found(model: str, cluster: str, limit: int) -> tuple[str, ...]:
    import torch
    import transformers as t

    import sbpflow as flow
    from sbpflow.boxing.figures import duration

    with torch.device("meta"):
        made = {
            "gpt2-medium": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
            "llama-7b": lambda: t.LlamaForCausalLM(t.LlamaConfig()),
            "mixtral-8x7b": lambda: t.MixtralForCausalLM(t.MixtralConfig()),
            "t5-large": lambda: t.T5ForConditionalGeneration(
                t.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0)
            ),
        }[model]()
        words = torch.zeros(64, 1024, dtype=torch.long)
    start, wall = time.process_time(), time.perf_counter()
    batch = {"input_ids": words, "labels": words.clone()}
    found = flow.find_plan(made, batch, cluster=cluster, memory=limit * 2.0**30 or None)
    spent, passed = time.process_time() - start, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    solution = found.checked.report.solution
    gap = 1 - solution.bound / solution.optimum if solution is not None and solution.bound is not None else 0.0
    planned = 1 + sum(one.checked is not None for one in found.runners_up)
    lines = [f"{spent:.1f}", f"{passed:.1f}", f"{peak:.2f}", f"{planned} of {1 + len(found.runners_up)}"]
    return (
        model,
        cluster,
        str(limit or ""),
        *lines,
        duration(found.checked.seconds),
        f"{max(gap, 0.0):.2%}",
        found.found,
    )


def _model(name: str, samples: int) -> tuple[Any, Any, Any]:
    """A model on meta, its batch and its loss."""
    import torch
    import transformers as t

    from benchmarks.scale.families import loss_of, made
    from benchmarks.scale.setting import Architecture

    def words(length: int) -> torch.Tensor:
        return torch.zeros(samples, length, dtype=torch.long)

    trained: Mapping[str, Architecture] = {
        "gpt-3-175b": Architecture("gpt", 96, 12288, 96, 51200, 2048),
        "llama-3-405b": Architecture("llama", 126, 16384, 128, 128256, 8192, 53248, 8),
    }
    with torch.device("meta"):
        if name in trained:
            of = trained[name]
            return made(of), (words(of.length), words(of.length)), loss_of
        if name == "vit-huge":
            sizes = t.ViTConfig(hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120)
            images = {"pixel_values": torch.zeros(samples, 3, 224, 224), "labels": words(1)[:, 0]}
            return t.ViTForImageClassification(sizes), images, None
        makers: Mapping[str, Callable[[], tuple[Any, int]]] = {
            "llama-3-8b": lambda: (
                t.LlamaForCausalLM(
                    t.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, vocab_size=128256)
                ),
                4096,
            ),
            "qwen3-30b-a3b": lambda: (
                t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(num_hidden_layers=48, norm_topk_prob=True, head_dim=128)),
                4096,
            ),
            "deepseek-v3": lambda: (t.DeepseekV3ForCausalLM(t.DeepseekV3Config()), 4096),
            "mixtral-8x7b": lambda: (t.MixtralForCausalLM(t.MixtralConfig(sliding_window=None)), 4096),
            "t5-large": lambda: (
                t.T5ForConditionalGeneration(
                    t.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0)
                ),
                512,
            ),
        }
        model, length = makers[name]()
        return model, {"input_ids": words(length), "labels": words(length)}, None


def _found_degrees(name: str, cards: int, samples: int) -> tuple[str, ...]:
    import sbpflow as flow
    from sbpflow.boxing.figures import duration
    from sbpflow.nn.plan.search.estimates.ahead import processes_here
    from sbpflow.nn.plan.search.estimates.degrees import THINGS

    model, batch, loss = _model(name, samples)
    cluster = f"h100x8*{cards // 8}"
    start, wall = time.process_time(), time.perf_counter()
    sought = f"{CAST}\nseek {', '.join(THINGS)}"
    found = flow.find_plan(
        model, batch, plan=sought, cluster=cluster, ranks=cards, loss_fn=loss, processes=processes_here()
    )
    passed = time.perf_counter() - wall
    other_process = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() - start + other_process.ru_utime + other_process.ru_stime
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    other = ""
    if name in PUBLISHED:
        text = f"{PUBLISHED[name]}\n{CAST}\nseek micro-batches, schedule, recompute"
        there = flow.find_plan(model, batch, plan=text, cluster=cluster, ranks=cards, loss_fn=loss)
        other = f"{there.checked.seconds / found.checked.seconds:.2f}"
    return (
        name,
        str(cards),
        str(samples),
        *(f"{spent:.1f}", f"{passed:.1f}", f"{peak:.2f}"),
        *(duration(found.checked.seconds), f"{found.checked.memory / 2**30:.1f}", other, found.found),
    )


if __name__ == "__main__":
    what, model, where, number = sys.argv[1:]
    by_degrees = what == "degrees"
    print("|".join(_found_degrees(model, int(where), int(number)) if by_degrees else _found(model, where, int(number))))
