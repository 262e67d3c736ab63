"""Models of transformers by family, tiny and with random weights, trained in four ways beside one device.

python -m tests.nn.families            # what becomes of each, and docs/families.md anew: half an hour
python -m tests.nn.families llama t5   # of these alone
"""

import argparse
import copy
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import S
from sbpflow.sbp import SbpLike

__all__ = ["FAMILIES", "WAYS", "Family", "outcome", "rows_of", "said", "table"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
RIGHT = "right"
STEPS, ROWS, LENGTH, VOCABULARY, CLASSES, IMAGE = 2, 8, 10, 64, 3, 32
OFF = 1e-5  # many compute in float32 inside, whatever their weights are
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

PLACE = 3  # the token in whose place a patch of a picture goes
PICTURE = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a model is made: what transformers loads it by, and what its config says besides `SMALL`. Where it is
    refused, `otherwise` is what to say in its config so that it is not. `eagerly` has the modules that a graph runs
    eagerly, and why."""

    auto: str = "AutoModelForCausalLM"
    sizes: dict[str, Any] = field(default_factory=dict)
    otherwise: dict[str, Any] = field(default_factory=dict)
    eagerly: tuple[str, str] | None = None

    def batch(self, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
        tokens, classes = torch.randint(3, VOCABULARY, (rows, length)), torch.randint(CLASSES, (rows,))
        if self.auto == PICTURES:
            tokens = tokens.where(tokens != PLACE, PLACE + 1)
            tokens[:, 1:5] = PLACE  # for as many patches
            seen = torch.randn(rows, 3, 16, 16, dtype=torch.float64)
            return {"input_ids": tokens, "labels": tokens.where(tokens != PLACE, -100), "pixel_values": seen}
        if self.auto == "AutoModelForImageClassification":
            return {"pixel_values": torch.randn(rows, 3, IMAGE, IMAGE, dtype=torch.float64), "labels": classes}
        return {"input_ids": tokens, "labels": classes if "Sequence" in self.auto else tokens}


IMAGES, SENTENCES, PAIRS, PICTURES = (
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageTextToText",
)
FAMILIES = {
    **{name: Family() for name in (
        "arcee", "biogpt", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2",
        "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "llama", "mistral",
        "modernbert-decoder", "mpt", "nemotron", "olmo", "olmo2", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen3",
        "smollm3", "stablelm", "starcoder2",
    )},
    "mamba": Family(sizes={"time_step_rank": 4}),
    "recurrent_gemma": Family(sizes={"num_hidden_layers": 3}),
    "mixtral": Family(sizes={"num_local_experts": 4, "experts_implementation": "batched_mm"}),
    "deepseek_v3": Family(sizes={
        **EXPERTS, **HALVED_KEYS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    }),
    "gpt_oss": Family(sizes={**EXPERTS, "num_local_experts": 4, "head_dim": 8}),
    "olmoe": Family(sizes=EXPERTS),
    "qwen2_moe": Family(sizes={**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": Family(sizes=EXPERTS),
    "glm4_moe": Family(sizes={
        **EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
    }),
    "llama4_text": Family(sizes={"num_local_experts": 4, "intermediate_size_mlp": 64, "head_dim": 8}),
    "phimoe": Family(sizes={"num_local_experts": 4, "experts_implementation": "batched_mm"}),
    "qwen3_next": Family(sizes={
        **EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "llava": Family(PICTURES, {
        "vision_config": {**PICTURE, "model_type": "clip_vision_model"}, "vision_feature_layer": -1,
        "text_config": {**SMALL, **ENDS, "model_type": "llama"}, "image_token_id": PLACE,
    }),
    "bert": Family(SENTENCES),
    "albert": Family(SENTENCES, {"embedding_size": 16}, {"num_hidden_groups": 2}),
    "deberta-v2": Family(
        SENTENCES,
        otherwise={"problem_type": "single_label_classification"},
        eagerly=("", "the forward of the whole model picks the samples that have a label by `nonzero`"),
    ),
    "distilbert": Family(SENTENCES, {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "electra": Family(SENTENCES, {"embedding_size": 16}),
    "roberta": Family(SENTENCES),
    "bart": Family(PAIRS),
    "pegasus": Family(PAIRS),
    "t5": Family(PAIRS, {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    "beit": Family(IMAGES),
    "convnext": Family(IMAGES, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4}),
    "dinov2": Family(IMAGES),
    "resnet": Family(IMAGES, {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"}),
    "swin": Family(
        IMAGES, {"embed_dim": 8, "depths": [1, 1], "num_attention_heads": [1, 2], "window_size": 4, "patch_size": 2}
    ),
    "vit": Family(IMAGES),
}  # fmt: skip


def made(name: str, *, otherwise: bool = False, small: Mapping[str, int] | None = None) -> nn.Module:
    """In float64, where what is rounded differently shows least; `small` goes before `SMALL`."""
    hub: Any = importlib.import_module("transformers")
    family, usual = FAMILIES[name], hub.AutoConfig.for_model(name)
    known = {key: value for key, value in {**SMALL, **(small or {})}.items() if hasattr(usual, key)}
    sizes = known | ENDS | family.sizes | (family.otherwise if otherwise else {})
    torch.manual_seed(0)
    model: nn.Module = getattr(hub, family.auto).from_config(hub.AutoConfig.for_model(name, **sizes))
    return model.double()


def loss_fn(model: nn.Module, **batch: Tensor) -> Tensor:
    more = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return model(**batch, **more).loss  # type: ignore[no-any-return]


Step = Callable[..., Tensor]


def sgd(model: nn.Module, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def plain(model: nn.Module, lay: Callable[[Tensor], Tensor] = lambda value: value, momentum: float = 0.0) -> Step:
    """The loop that everybody writes, on a batch that is laid out first."""
    optimizer = sgd(model, momentum)

    def step(**batch: Tensor) -> Tensor:
        loss = loss_fn(model, **{name: lay(value) for name, value in batch.items()})
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def eager(hints: dict[str, SbpLike], model: nn.Module) -> Step:
    where = flow.placement("cpu", range(4))
    flow.nn.to_global(model, where, hints)
    return plain(model, lambda value: flow.tensor(value, placement=where, sbp=S(0)))


def graph(model: nn.Module) -> Step:
    return flow.compile(model, loss_fn, sgd(model), placement=flow.placement("cpu:[0-3] as (data=2, tensor=2)"))


def pipeline(model: nn.Module) -> Step:
    """The longest list of layers in halves; the rest goes where its neighbours are."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList)]
    stages = [flow.placement("cpu", [0]), flow.placement("cpu", [1])]
    longest = max(lists, key=len)
    flow.nn.pipeline(longest, stages)
    return flow.compile(model, loss_fn, sgd(model), micro_batches=2)


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "data parallel": lambda model: eager({}, model),
    "all S(0)": lambda model: eager({"*": S(0)}, model),
    "graph": graph,
    "pipeline": pipeline,
}


def outcome(name: str, way: str, *, otherwise: bool = False) -> str:
    """`right`, or the first line of the error; weights after some steps are compared. A wrong value raises."""
    model = made(name, otherwise=otherwise).train(way != "pipeline")  # whose dropout is drawn by micro-batch
    batches = [FAMILIES[name].batch() for _ in range(STEPS)]
    one = copy.deepcopy(model)
    if way == "graph" and FAMILIES[name].eagerly and not otherwise:
        flow.nn.eager(model.get_submodule(FAMILIES[name].eagerly[0]))  # type: ignore[index]
    wanted = losses_of(plain(one), batches)
    try:
        losses = losses_of(WAYS[way](model), batches)
    except flow.SbpflowError as error:
        return str(error).splitlines()[0]
    mine = dict(everything(model))
    apart = {name: distance(mine[name], value) for name, value in everything(one)}
    off = {name: by for name, by in apart.items() if not by < OFF}  # which nan is not
    assert all(abs(a - b) < OFF for a, b in zip(losses, wanted, strict=True)), f"{losses} for {wanted}"
    assert not off, f"these are off: {off}"
    return RIGHT


def losses_of(step: Step, batches: list[dict[str, Tensor]]) -> list[float]:
    torch.manual_seed(1)
    return [step(**batch).item() for batch in batches]


def everything(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def distance(mine: Tensor, wanted: Tensor) -> float:
    whole = mine.full_tensor() if isinstance(mine, flow.GlobalTensor) else mine
    return (whole.double() - wanted.double()).abs().max().item() if wanted.numel() else 0.0


def table(page: Path = PAGE) -> dict[tuple[str, str], str]:
    """Words of docs/families.md, or of another such page, on each family and way."""
    rows = [line.strip("| ").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    head, _, *rest = [[entry.strip() for entry in row] for row in rows]
    return {(row[0], way): said for row in rest for way, said in zip(head[1:], row[1:], strict=True)}


TOP = """# Families of models

Models of {count} families, as transformers {version} has them and nobody changed them, tiny and with random weights in
float64. Each is trained for {steps} steps of SGD in four ways, and losses, weights and buffers are held to those of one
device. `make sweep` runs all of them, `make test` a sample, and both hold them to this page, which is generated:

```sh
python -m tests.nn.families
```

- **data parallel**: weights `B`, the batch `S(0)`, on 4 ranks, eagerly. **all S(0)**: weights `S(0)` too.
- **graph**: `flow.compile` on 2 x 2 ranks, which chooses all signatures.
- **pipeline**: layers on two stages, two micro-batches.

*refused* is an error that names the op and the line; it is quoted below.

"""


OTHERS = """
## diffusers

Six models of diffusers 0.42, tiny and in float64, were tried by hand: diffusers is no dependency of these tests. Each
was trained for three steps of SGD as a graph, on one rank, on 2 x 2 ranks, and by the plan

```text
grid cpu (data=2, tensor=2)
**: data=S(0)
input x <- data=S(0)
```

- UNet2DModel, UNet2DConditionModel, AutoencoderKL: blocks of convolutions and attention over pixels
- DiTTransformer2DModel, SD3Transformer2DModel, FluxTransformer2DModel: transformers over patches

In all three ways losses were those of one device to eight digits, and after the last step no weight was off by more
than 2.2e-16. What they need of a graph is tested with small modules: configs that refuse changes, and tensors that do
not lie row by row.
"""


def page(found: dict[tuple[str, str], str]) -> str:
    """The table as a page, and why what is refused is."""
    hub: Any = importlib.import_module("transformers")
    lines = ["", "In all four ways these are right:", ""]
    for name, family in FAMILIES.items():
        lines += [f"- {name} with `{key}={value!r}` in its config" for key, value in family.otherwise.items()]
    lines += ["", "In graphs these are marked, so that they [run eagerly](graphs.md#eager-parts):", ""]
    for name, family in FAMILIES.items():
        if family.eagerly:
            path, why = family.eagerly
            lines.append(f"- {name}: `flow.nn.eager(model{path and f'.{path}'})`, because {why}")
    top = TOP.format(count=len(FAMILIES), version=hub.__version__, steps=STEPS)
    return top + rows_of(found, FAMILIES, WAYS) + "\n".join(lines) + "\n" + OTHERS


def rows_of(found: dict[tuple[str, str], str], names: Iterable[str], ways: Iterable[str]) -> str:
    """The outcome of each family in each way, and the reasons of what is refused."""
    ways = list(ways)
    rows = [["family", *ways], ["---"] * (1 + len(ways))]
    rows += [[name, *(said(found[name, way]) for way in ways)] for name in names]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    reasons: dict[str, list[str]] = {}
    for (name, way), text in found.items():
        if text != RIGHT:
            reasons.setdefault(re.sub(r"\S*/(?=[^/]+\.py:\d+)", "", text), []).append(f"{name} ({way})")
    if reasons:
        lines += ["", "## Refused", "", *(f"- {', '.join(where)}: `{text}`" for text, where in reasons.items())]
    return "\n".join(lines) + "\n"


def said(found: str) -> str:
    return RIGHT if found == RIGHT else "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=[])
    given = parser.parse_args()
    found = {}
    for name in given.families or FAMILIES:
        for way in WAYS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found[name, way] = outcome(name, way)
            print(f"{name:20} {way:14} {found[name, way]}", flush=True)
    if not given.families:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
