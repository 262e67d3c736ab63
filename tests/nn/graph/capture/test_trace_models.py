"""Whole models captured as they are: a GPT, a ResNet, and those of transformers with both kinds of attention."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.counts import calls
from tests.nn.graph.same import ops_of, same, traced


class Basic(nn.Module):
    """A residual block as usually written, with relu in place and `+=`."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down: nn.Module | None = None
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Any:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2))
        self.layers = nn.Sequential(Basic(8, 8), Basic(8, 8), Basic(8, 16, 2), Basic(16, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1)
        return F.cross_entropy(self.head(h), y, label_smoothing=0.1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 * self.training, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int = 64, words: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(32, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embed(tokens) + self.place[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.masked_fill(torch.arange(12) < 3, -100)
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_resnet(training: bool) -> None:
    logical = same(ResNet().train(training), IMAGES, torch.arange(4), atol=1e-5)
    assert len(logical.writes) == (30 if training else 0)
    assert {op.origin.block for op in logical.ops} == {"", "layers.0", "layers.1"}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gpt(training: bool) -> None:
    names = ops_of(same(GPT(3).train(training), TOKENS, TOKENS))
    assert names.count("scaled_dot_product_attention") == 3
    assert names.count("dropout") == (6 if training else 0)


def test_to_capture_a_layer_takes_as_many_calls_however_many_there_are() -> None:
    def of(layers: int) -> int:
        model = GPT(layers)
        return calls(lambda: traced(model, TOKENS, TOKENS))

    of(2)  # what is imported and cached by the first
    two, four, eight, sixteen = of(2), of(4), of(8), of(16)
    assert abs((sixteen - eight) - 4 * (four - two)) < 0.1 * (sixteen - eight), (two, four, eight, sixteen)


def test_48_layers_are_captured_with_their_names() -> None:
    logical, _ = traced(GPT(48), TOKENS, TOKENS)
    assert len(logical.ops) == 824
    assert {op.origin.block for op in logical.ops} == {"", *(f"layers.{k}" for k in range(48))}


# transformers


SIZES = {"vocab_size": 96, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def gpt2(t: Any, **more: Any) -> Any:
    sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **more))


def llama(t: Any, **more: Any) -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, num_key_value_heads=2, **more))


def bert_classes(t: Any, **more: Any) -> Any:
    return t.BertForSequenceClassification(t.BertConfig(**SIZES, **more))


def bert_words(t: Any, **more: Any) -> Any:
    return t.BertForMaskedLM(t.BertConfig(**SIZES, **more))


def vit(t: Any, **more: Any) -> Any:
    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5, **more))


def t5(t: Any, **more: Any) -> Any:
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=0, **more))


def mixtral(t: Any, **more: Any) -> Any:
    """Experts as batched products: other ways pick tokens by value."""
    experts = {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "batched_mm"}
    return t.MixtralForCausalLM(t.MixtralConfig(**SIZES, num_key_value_heads=2, **experts, **more))


WORDS = {"input_ids": TOKENS, "labels": LABELS}
MASKED = {**WORDS, "attention_mask": (torch.arange(12) < torch.tensor([[12], [9]])).long()}
CASES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (gpt2, WORDS),
    (gpt2, MASKED),
    (llama, WORDS),
    (llama, MASKED),
    (bert_classes, {"input_ids": TOKENS, "labels": torch.tensor([0, 1])}),
    (bert_words, MASKED),
    (vit, {"pixel_values": IMAGES, "labels": torch.arange(4)}),
    (t5, WORDS),
    (t5, MASKED),
    (mixtral, WORDS),
]


@pytest.mark.sweep
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("make", "kwargs"), CASES, ids=[f"{f.__name__}-{len(k)}" for f, k in CASES])
def test_transformers(make: Callable[..., nn.Module], kwargs: dict[str, Any], attention: str, training: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        transformers = pytest.importorskip("transformers")
        model = make(transformers, attn_implementation=attention).train(training)
        logical = same(model, **kwargs)
    assert ("scaled_dot_product_attention" in ops_of(logical)) == (attention == "sdpa")
