"""Decoding: one token more by a compiled step, beside eager torch, in turn in one run.

    python -m benchmarks.generation [--write] [--only llama gemma3 ...]

Both go on in a static cache with the masks that `generate` makes, which is not in the times. They are times of the
processor, since those of a clock would have other work of the machine in them: one row, one rank, one thread.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as of

import sbpflow as flow
from benchmarks.parts.command import command_line, reported
from benchmarks.parts.tables import judged, ms

MACHINE = platform.machine()
LAYERS, PROMPT, ROOM, AIM = 8, 8, 256, 0.5
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": ROOM, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: of.LlamaForCausalLM(of.LlamaConfig(**SIZES)),
    "qwen3": lambda: of.Qwen3ForCausalLM(of.Qwen3Config(**SIZES, head_dim=16)),
    "gemma3": lambda: of.Gemma3ForCausalLM(of.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=64)),
}


def decoded(model: Any, tokens: int) -> list[float]:
    """The microseconds of forwards that decode so many tokens behind a prompt."""
    ids = torch.randint(3, 256, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    cache = of.StaticCache(config=model.config, max_cache_len=ROOM)
    times = []
    with torch.no_grad():
        for at in range(PROMPT - 1, PROMPT + tokens):
            first = at < PROMPT
            places = torch.arange(PROMPT)[None] if first else torch.tensor([[at]])
            given = model.prepare_inputs_for_generation(
                ids if first else ids[:, -1:], cache=cache, position_ids=places, is_first_iteration=first,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            begin = time.process_time()
            ids = model(**given, return_dict=True).logits[:, -1:].argmax(-1)
            times += [] if first else [(time.process_time() - begin) * 1e6]
    return times


def pair(name: str, rounds: int, tokens: int) -> tuple[list[float], list[float], list[float]]:
    """Medians of rounds in turn: eager torch, a step of kernels that are fused, and one of torch's."""
    torch.manual_seed(0)
    alone = MODELS[name]().eval()
    ways = [alone]
    for backend in ("inductor", "code"):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        flow.nn.generation(flow.compile(model, placement=flow.placement("cpu", range(1)), backend=backend))
        ways.append(model)
    for model in ways:
        decoded(model, 5)
    found: tuple[list[float], ...] = ([], [], [])
    for _ in range(rounds):
        for times, model in zip(found, ways, strict=True):
            times.append(statistics.median(decoded(model, tokens)))
    return found[0], found[1], found[2]


def report(names: list[str], *, quick: bool) -> Iterator[str]:
    yield f"{MACHINE}, torch {torch.__version__}, transformers {of.__version__}; {LAYERS} layers, one thread."
    yield ""
    yield "| a token of | eager, ms | inductor, ms | ratio | aim | met | torch's ops, ms | ratio |"
    yield "|---|--:|--:|--:|--:|---|--:|--:|"
    for name in names:
        eager, fused, code = pair(name, 1 if quick else 9, 5 if quick else 40)
        share = [statistics.median(a / b for a, b in zip(mine, eager, strict=True)) for mine in (fused, code)]
        cells = [name, ms(eager), ms(fused), *judged(share[0], AIM), ms(code), f"{share[1]:.2f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    options = command_line(__doc__, MODELS).parse_args()
    reported("generation", report(options.only, quick=options.quick), write=options.write)
