"""Models of four libraries by family, under plans of the language beside one device.

python -m tests.nn.plan.families            # what becomes of each, and docs/evidence/plan_families.md anew
python -m tests.nn.plan.families llama t5   # of these alone, and their rows
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow.boxing.graph.move_table import moves_of
from sbpflow.boxing.graph.physical import Op
from sbpflow.nn.graph.optimizer.adopted_model import AdoptedModel
from sbpflow.placement.world import owned
from tests.libraries import library
from tests.nn.families import (
    FAMILIES,
    LIBRARIES,
    RIGHT,
    Loss,
    distance,
    everything,
    layers_of,
    losses_of,
    made,
    make_page,
    near,
    plain,
    rows_of,
    sgd,
)
from tests.nn.family_tables.family import named_loss
from tests.nn.plan.sent_bytes import planned_bytes

__all__ = ["COLUMNS", "FEW", "PAGE", "PLANNED", "WITH_A_PLAN", "Column", "Size", "apart", "compiled", "outcome"]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "plan_families.md"
STEPS, MOMENTUM = 2, 0.9
WITH_A_PLAN = [  # a tp_plan
    "arcee", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "gpt_neox", "granite", "llama", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2", "granitemoe", "phimoe", "glm4_moe", "llama4_text",
    "minimax", "qwen3_next", "jamba",
]  # fmt: skip
PLANNED = [
    *WITH_A_PLAN,
    "biogpt", "gpt2", "codegen", "bloom", "falcon", "gpt_bigcode", "modernbert-decoder", "mpt", "opt", "persimmon",
    "stablelm", "mamba", "recurrent_gemma", "gpt_oss", "mamba2", "falcon_h1", "bamba", "zamba2", "gptj", "gpt_neo",
    "ctrl", "xlnet", "bert", "distilbert", "electra", "roberta", "big_bird", "fnet", "modernbert", "bart", "pegasus",
    "marian", "mbart", "t5", "longt5", "beit", "convnext", "dinov2", "resnet", "swin", "vit", "segformer", "vit_mae",
    "videomae", "timesformer", "clip", "siglip", "llava", "paligemma", "whisper", "wav2vec2", "hubert", "wavlm",
    "audio-spectrogram-transformer", "patchtst",
    *(f"diffusers UNet2D{kind}Model" for kind in ("", "Condition")),
    *(f"diffusers {name}" for name in ("ControlNetModel", "AutoencoderKL", "VQModel")),
    *(f"diffusers {name}Transformer2DModel" for name in ("DiT", "PixArt", "SD3", "Flux", "Sana", "AuraFlow")),
    "diffusers WanTransformer3DModel",
    *(f"timm {name}" for name in ("vit", "resnet18d", "efficientnet", "convnextv2", "mixer", "swin")),
    "timm poolformer", "timm nfnet",
    *(f"torchvision {name}" for name in ("mobilenet_v2", "mobilenet_v3", "swin_v2", "maxvit", "fcn", "deeplabv3", "r3d",
    "r2plus1d", "mvit", "swin3d")),
]  # fmt: skip
CODER, BLOCKS = ("encoder.down_blocks", "decoder.up_blocks"), ("transformer_blocks",)
PAIR = ("model.encoder.layers", "model.decoder.layers")
TOWERS = {  # of layers, where these are not the longest list
    "bart": PAIR, "pegasus": PAIR, "marian": PAIR, "mbart": PAIR, "whisper": PAIR,
    "t5": ("encoder.block", "decoder.block"), "longt5": ("encoder.block", "decoder.block"),
    "clip": ("text_model.encoder.layers", "vision_model.encoder.layers"),
    "llava": ("model.vision_tower.encoder.layers", "model.language_model.layers"),
    "paligemma": ("model.vision_tower.encoder.layers", "model.language_model.layers"),
    **{f"diffusers UNet{kind}Model": ("down_blocks", "up_blocks") for kind in ("2D", "2DCondition", "3DCondition")},
    "diffusers ControlNetModel": ("down_blocks",),
    **{f"diffusers {kind}": CODER for kind in ("AutoencoderKL", "VQModel", "AutoencoderDC")},
    **{f"diffusers {kind}Transformer2DModel": BLOCKS for kind in ("DiT", "PixArt", "SD3", "Sana")},
    "diffusers CogVideoXTransformer3DModel": BLOCKS, "diffusers WanTransformer3DModel": ("blocks",),
    "diffusers FluxTransformer2DModel": ("transformer_blocks", "single_transformer_blocks"),
    "diffusers AuraFlowTransformer2DModel": ("single_transformer_blocks",),
}  # fmt: skip
NARROW = {"mamba2", "bamba", "xlnet"}  # whose heads are not of any width
OFF = 1e-5  # of what a step changes in a tensor: many models compute in float32 inside, whatever their weights are


@dataclass(frozen=True)
class Size:
    """How large a batch is, and a model."""

    rows: int
    length: int
    small: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rows} x {self.length}"


# So wide for so few tokens that it pays to move results, and not weights; most have 2 heads of keys, cut in halves.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
MANY, FEW, EVEN = Size(22, 30), Size(5, 7, WIDE), Size(5, 8, WIDE)


@dataclass(frozen=True)
class Column:
    """A plan, a size at which it pays, and what a step by it has to send: one that does not is no such plan."""

    plan: str
    size: Size
    sends: tuple[str, ...] = ()


COLUMNS = {
    "data parallel": Column(
        "grid (data=4)\ninput * <- data=S(0)",
        MANY,
        ("backward all_reduce over data",),
    ),
    "ZeRO-2": Column(
        "grid (data=4)\ninput * <- data=S(0)\n{grads,states} **: data=S(0)",
        MANY,
        ("backward reduce_scatter over data", "update all_gather over data"),
    ),
    "ZeRO-3": Column(
        "grid (data=4)\ninput * <- data=S(0)\n**: data=S(0)",
        MANY,
        ("forward all_gather over data", "again all_gather over data", "backward reduce_scatter over data"),
    ),
    "tensor parallel": Column(
        "grid (tensor=4)\ntake tp_plan over tensor",
        FEW,
        ("forward all_reduce over tensor", "backward all_reduce over tensor"),
    ),
    "tensor, sequence, recompute": Column(
        """grid (tensor=4)
take tp_plan over tensor
**.layers.*.*norm* -> tensor=S(1)
**.layers.* -> tensor=S(1)
recompute **.layers.*.{self_attn,attention}.core""",
        EVEN,
        (
            "forward all_gather over tensor",
            "forward reduce_scatter over tensor",
            "backward all_gather over tensor",
            "backward reduce_scatter over tensor",
        ),
    ),
    "2 stages x 2 tensor": Column(
        """grid (pipe=2, tensor=2)
take tp_plan over tensor
pipe **.layers over pipe by 1f1b, 2 micro-batches""",
        FEW,
        ("forward all_reduce over tensor", "forward transfer", "backward transfer"),
    ),
}


def compiled(model: nn.Module, plan: str, loss_fn: Loss = named_loss) -> flow.nn.Graph:
    return flow.compile(model, loss_fn, sgd(model, MOMENTUM), plan=plan)


def plan_of(name: str, model: nn.Module, column: Column, batch: Mapping[str, Tensor]) -> str:
    """The column's plan. Where a config has none for its tensors, weights are cut along their first dim; sequences and
    images come in pieces of words and rows, if the column's do."""
    if name in WITH_A_PLAN:
        return column.plan
    towers = TOWERS.get(name) or (layers_of(model)[0],)
    lines = [line for line in column.plan.splitlines() if not line.startswith("**.layers.")]
    if len(lines) < len(column.plan.splitlines()):
        lines += [f"input {key} <- tensor=S({(x.ndim + 1) // 2})" for key, x in batch.items() if x.ndim > 1]
    lines = ["**: tensor=S(0)" if line.startswith("take") else line for line in lines]
    recomputed = [f"recompute {path}.*" for path in towers]
    piped = [line.replace("**.layers", path) for line in lines if line.startswith("pipe") for path in towers]
    lines = [line for line in lines if not line.startswith(("pipe", "recompute"))]
    return "\n".join(lines + recomputed * ("\nrecompute" in column.plan) + piped)


def outcome(name: str, column: Column) -> str:
    """`right`, or the first line of the error; losses, and what steps change, are compared. A wrong value raises, and
    so does a step that is none by such a plan, or that sends or holds other bytes than were predicted."""
    size, family = column.size, FAMILIES[name]
    model: Any = made(name, small={} if name in NARROW else size.small).train()
    piped = "pipe" in column.plan
    if piped:  # whose statistics are of a whole batch
        for part in model.modules():
            part.train(not isinstance(part, nn.modules.batchnorm._BatchNorm))
    # Where the first and the last stage share a weight, micro-batches of two sizes are an error.
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    rows = size.rows + (size.rows % 2 if piped and tied else 0)
    batches = [family.batch(rows, size.length) for _ in range(STEPS)]
    one, before = copy.deepcopy(model), copy.deepcopy(model)
    wanted = losses_of(plain(one, momentum=MOMENTUM, loss_fn=family.loss), batches)
    try:
        step = compiled(model, plan_of(name, model, column, batches[0]), family.loss)
        torch.manual_seed(1)
        losses = [step(**batch).item() for batch in batches[:-1]]
        with flow.record() as moves, brought() as gradients:
            losses.append(step(**batches[-1]).item())
    except flow.SbpflowError as error:
        return str(error).splitlines()[0]
    assert all(near(a, b) for a, b in zip(losses, wanted, strict=True)), f"{losses} for {wanted}"
    off = {path: by for path, by in apart(model, one, before).items() if not by < OFF}
    assert not off, f"these change by so much of themselves more or less than on one device: {off}"
    if name in WITH_A_PLAN:
        assert sent(step).issuperset(column.sends), f"it sends {sorted(sent(step))}"
        assert ("recompute" in column.plan) == any(
            op.origin.recompute for op in step.physical.steps if isinstance(op, Op)
        )
    went, planned = sum(move.boxing.total for move in moves), planned_bytes(step)
    assert went == planned, f"{went} bytes for {planned}"
    held = {rank: (of.parameters, gradients[rank], of.states) for rank, of in step.memory_at_rest().items()}
    told = {rank: (of.parameters, of.gradients, of.states) for rank, of in step.planned.held().items()}
    assert held == told, f"ranks hold {held} bytes of weights, gradients and states for {told}"
    return RIGHT


@contextmanager
def brought() -> Iterator[Counter[int]]:
    """The bytes of gradients of each rank, as they come to the update of a step."""
    found, update = Counter[int](), AdoptedModel.update

    def watched(model: AdoptedModel, grads: Mapping[str, tuple[Tensor, ...]]) -> None:
        for name, shards in grads.items():
            for rank, shard in zip(owned(model.trained[name].home.placement), shards, strict=True):
                found[rank] += shard.nbytes
        update(model, grads)

    with patch.object(AdoptedModel, "update", watched):
        yield found


def sent(step: flow.nn.Graph) -> set[str]:
    """The moves of a step that send, as `backward all_reduce over data`."""
    rows = moves_of(step.physical, step.planned.program.again)
    return {f"{row.direction} {way}".replace("_once", "") for row in rows if not row.free for way in row.ways}


def apart(model: nn.Module, one: nn.Module, before: nn.Module) -> dict[str, float]:
    """How much otherwise each tensor changed than on one device, as a part of the change."""
    mine, first = dict(everything(model)), dict(everything(before))
    return {
        path: distance(mine[path], value) / (distance(first[path], value) + 1e-7) for path, value in everything(one)
    }


TOP = """# Families of models under plans

Models of {count} families, as {versions} have them
and nobody changed them, tiny and with random weights in float64, under six [plans](../plans.md). Each is trained for
{steps} steps of SGD with momentum; losses, and what every tensor changes by, hence its gradients, are held to those of
one device; the bytes that a step sends to those that were predicted, and the bytes of weights, gradients and states of
every rank to those that its plan told. A step also has to send what its plan is for, such as forward and backward
`all_gather` and `reduce_scatter` where sequences are cut. `make test` runs a sample, `make sweep` one plan of each
family and `make rest` all others, and hold them to this page, which is generated:

```sh
python -m tests.nn.plan.families
```

Rows do not divide by four: ranks and micro-batches have unequal parts of the batch. The first three plans have batches
of {many} tokens. The others have {few} or {even}, and wider models, so that it pays to move results and not
weights; most of these have 2 heads of keys, fewer than ranks. Models whose first and last layer share a weight have one
row more in stages: micro-batches of two sizes may want such a weight in two ways, which is an error.

The first {planned} have a `tp_plan` in their configs. For the others `**: tensor=S(0)` stands in its place, layers are
the longest list of these, or those of an encoder and a decoder with a `pipe` line each, and in the fifth plan `input`
lines cut sequences, and images by rows. Batch norm evaluates in stages. Names without a library are of transformers.

"""
REFUSED = "*refused* is an error that names the op and the line; it is quoted below.\n\n"


def page(found: dict[tuple[str, str], str]) -> str:
    versions = ", ".join(f"{name} {library(name).__version__.partition('+')[0]}" for name in LIBRARIES)
    sizes = {"many": MANY, "few": FEW, "even": EVEN}
    counts = {"count": len(PLANNED), "planned": len(WITH_A_PLAN), "steps": STEPS}
    top = TOP.format(**counts, **sizes, versions=versions)
    top += "".join(f"**{name}**\n\n```text\n{column.plan}\n```\n\n" for name, column in COLUMNS.items())
    return top + REFUSED * (set(found.values()) != {RIGHT}) + rows_of(found, PLANNED, COLUMNS)


if __name__ == "__main__":
    make_page(__doc__, PLANNED, COLUMNS, lambda name, plan: outcome(name, COLUMNS[plan]), page, PAGE)
