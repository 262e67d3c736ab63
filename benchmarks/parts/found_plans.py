"""The time and memory of finding a plan for a model of transformers, on meta and a described cluster."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["CASES", "CLUSTERS", "MODELS", "found_rows"]

CLUSTERS = ("h100x8", "h100x8*2", "h100x8*16", "h100x8*128")
MODELS = ("gpt2-medium", "llama-7b", "mixtral-8x7b", "t5-large")
CASES = [(model, cluster, 0) for cluster in CLUSTERS for model in MODELS] + [("llama-7b", "h100x8", 60)]
COLUMNS = ("model", "cluster", "limit, GiB", "processor s", "wall s", "process GiB", "plans", "step", "gap", "answer")


def found_rows(cases: list[tuple[str, str, int]]) -> Iterator[tuple[str, ...]]:
    """A row a case, with what the columns are."""
    yield COLUMNS
    for case in cases:
        command = [sys.executable, "-m", "benchmarks.parts.found_plans", *map(str, case)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        yield tuple(said.strip().splitlines()[-1].split("|"))


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
    found = flow.plan(made, batch, cluster=cluster, memory=limit * 2.0**30 or None)
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


if __name__ == "__main__":
    print("|".join(_found(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
