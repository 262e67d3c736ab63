"""Models as people write them, tiny and with random weights: six of transformers, dropout on, and a ResNet."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ZOO", "Kind", "adamw", "loss_fn", "made"]

VOCABULARY, LENGTH, ROWS, CLASSES, IMAGE = 64, 12, 8, 4, 16
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}  # the usual ones lie outside of a vocabulary as small


def hub(name: str) -> Any:
    """What transformers has under this name; its modules are loaded as they are asked for, and warn of each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module("transformers"), name)  # mypy would read all of it for a minute


def build(model: str, config: str, **sizes: Any) -> nn.Module:
    kind, of = hub(model), hub(config)
    return kind(of(**sizes))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    model = build("GPT2LMHeadModel", "GPT2Config", **sizes, **ENDS)
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else it is guessed from the name, and the log says so
    return model


def llama() -> nn.Module:
    return build("LlamaForCausalLM", "LlamaConfig", **WORDS, num_hidden_layers=3, num_key_value_heads=2)


def bert() -> nn.Module:
    return build("BertForSequenceClassification", "BertConfig", **WORDS, num_hidden_layers=2, num_labels=CLASSES)


def vit() -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 2, "image_size": IMAGE, "patch_size": 4, "num_labels": CLASSES}
    return build("ViTForImageClassification", "ViTConfig", **sizes)


def t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return build("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)


def mixtral() -> nn.Module:
    """Experts as batched products: the other ways pick tokens by value, and no shape is known before it runs."""
    experts = {"num_local_experts": 4, "experts_implementation": "batched_mm", "output_router_logits": True}
    return build("MixtralForCausalLM", "MixtralConfig", **WORDS, **experts, num_hidden_layers=2, num_key_value_heads=2)


class Residual(nn.Module):
    """Two convolutions around which the input goes, with relu in place and `+=`, as usually written."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A stem and three stages of two blocks, each of half the size and twice the channels."""

    def __init__(self, widths: tuple[int, int, int] = (8, 16, 32)) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0])
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        stages, inner = [], widths[0]
        for at, outer in enumerate(widths):
            stages.append(nn.Sequential(Residual(inner, outer, 1 if at == 0 else 2), Residual(outer, outer, 1)))
            inner = outer
        self.stages = nn.Sequential(*stages)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inner, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stages(self.maxpool(self.relu(self.bn1(self.conv1(pixel_values)))))
        return F.cross_entropy(self.fc(self.avgpool(x).flatten(1)), labels)


def words() -> dict[str, Tensor]:
    """Text that is to be continued."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def pairs() -> dict[str, Tensor]:
    """Text and its translation."""
    return {"input_ids": torch.randint(VOCABULARY, (ROWS, LENGTH)), "labels": torch.randint(VOCABULARY, (ROWS, 10))}


def sentences() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(VOCABULARY, (ROWS, LENGTH)), "labels": torch.randint(CLASSES, (ROWS,))}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, IMAGE, IMAGE), "labels": torch.randint(CLASSES, (ROWS,))}


@dataclass(frozen=True)
class Kind:
    """A model, a batch for it, and names of pairs of weights that split by columns, then by rows, as patterns.

    In `little` of the memory that it would take where nothing is short, it can be trained too.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    transposed: bool = False  # whether weights stand as (in, out)
    little: float = 0.6


ZOO = {
    "gpt2": Kind(gpt2, words, ("*.c_fc.weight",), ("*.mlp.c_proj.weight",), transposed=True, little=0.7),
    "llama": Kind(llama, words, ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.gate_proj.weight",
                                 "*.up_proj.weight"), ("*.o_proj.weight", "*.down_proj.weight")),
    "bert": Kind(bert, sentences, ("*.query.weight", "*.key.weight", "*.value.weight", "*.intermediate.dense.weight"),
                 ("*.attention.output.dense.weight", "*.[0-9].output.dense.weight")),
    "vit": Kind(vit, images, ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.fc1.weight"),
                ("*.o_proj.weight", "*.fc2.weight"), little=0.65),
    "t5": Kind(t5, pairs, ("*.q.weight", "*.k.weight", "*.v.weight", "*.wi.weight"), ("*.o.weight", "*.wo.weight")),
    "mixtral": Kind(mixtral, words, ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"), ("*.o_proj.weight",),
                    little=0.9),  # most of it are activations of experts
    "resnet": Kind(ResNet, images, ("*.conv1.weight",), ("*.conv2.weight",)),
}  # fmt: skip


def made(name: str, steps: int = 5) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A model that trains, and a batch for each of some steps; the same at each call."""
    torch.manual_seed(0)
    return ZOO[name].model().train(), [ZOO[name].batch() for _ in range(steps)]


def loss_fn(model: nn.Module, **batch: Tensor) -> Tensor:
    result = model(**batch)
    return result if isinstance(result, Tensor) else result.loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """`eps` stands above rounding: a bias of keys has no gradient, and Adam would make steps of what is left of it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
