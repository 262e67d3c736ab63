"""Ten small models for hosts that are played, each with a batch and a loss; the batch is that of all ranks together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "Batch", "Mean", "Model", "loss_of"]

Batch = dict[str, Tensor]
WORDS, ROWS = 2048, 8


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def made(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return self.make().train()

    def given(self) -> Batch:
        """The same samples each time."""
        torch.manual_seed(1)
        return self.batch()


def loss_of(model: Any, **batch: Tensor) -> Tensor:
    said = model(**batch)
    loss: Tensor = said if isinstance(said, Tensor) else said.loss
    return loss


class Classes(nn.Module):
    """A model with the loss of its classes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), labels)


class Blocks(nn.Module):
    """Layers one behind the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Mean(nn.Module):
    """The mean over some dims."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class Residual(nn.Module):
    """A block of two convolutions beside what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(self.norm1(x).relu())
        y: Tensor = x + self.conv2(self.norm2(h).relu())
        return y


class UNet(nn.Module):
    """Two halvings and two doublings, with what was before each beside what comes back."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        one, two, four = width, 2 * width, 4 * width
        self.enter = nn.Conv2d(3, one, 3, padding=1)
        self.blocks = nn.ModuleList(map(Residual, (one, two, four, four, two, one)))
        self.down1, self.down2 = nn.Conv2d(one, two, 2, 2), nn.Conv2d(two, four, 2, 2)
        self.up2, self.up1 = nn.ConvTranspose2d(four, two, 2, 2), nn.ConvTranspose2d(two, one, 2, 2)
        self.join2, self.join1 = nn.Conv2d(four, two, 1), nn.Conv2d(two, one, 1)
        self.leave = nn.Conv2d(one, 3, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first, second, third, fourth, fifth, sixth = self.blocks
        a = first(self.enter(x))
        b = second(self.down1(a))
        c = fourth(third(self.down2(b)))
        d = fifth(self.join2(torch.cat([self.up2(c), b], 1)))
        e = sixth(self.join1(torch.cat([self.up1(d), a], 1)))
        return F.mse_loss(self.leave(e), labels)


class Sequences(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.inner = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inner(self.words(x))[0]).flatten(0, 1), labels.flatten())


class Tables(nn.Module):
    """Features of many values each, looked up and mixed: nearly all weights are rows of tables."""

    def __init__(self, features: int = 8, rows: int = 16384, width: int = 32) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(features))
        self.mix = nn.Sequential(nn.Linear(features * width, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        found = [table(x[:, k]) for k, table in enumerate(self.tables)]
        return F.cross_entropy(self.mix(torch.cat(found, 1)), labels)


class WideAndDeep(nn.Module):
    """A linear model of many crossed features, and layers over looked-up ones, added up."""

    def __init__(self, rows: int = 200_000, deep: int = 20_000, width: int = 64) -> None:
        super().__init__()
        self.wide, self.deep = nn.Embedding(rows, 4), nn.Embedding(deep, width)
        self.layers = nn.Sequential(nn.Linear(8 * width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 4)

    def forward(self, x: Tensor, crossed: Tensor, labels: Tensor) -> Tensor:
        said = self.wide(crossed).sum(1) + self.head(self.layers(self.deep(x).flatten(1)))
        return F.cross_entropy(said, labels)


def _of_transformers(name: str, config: str, **words: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers as of

        model: nn.Module = getattr(of, name)(getattr(of, config)(**words))
        return model

    return make


def _conv(width: int = 192) -> nn.Module:
    layers = [nn.Conv2d(3, width, 4, 4), *(Residual(width) for _ in range(6)), Mean(2, 3), nn.Linear(width, 10)]
    return Classes(Blocks(*layers))


def _mlp(width: int = 1024) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
    return Classes(Blocks(*layers, nn.Linear(width, 10)))


def _words(rows: int = ROWS, length: int = 16) -> Batch:
    ids = torch.randint(3, WORDS, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _images(name: str = "x", size: int = 32) -> Batch:
    return {name: torch.randn(ROWS, 3, size, size), "labels": torch.arange(ROWS) % 10}


DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "use_cache": False,
    "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "mlp": Model(_mlp, lambda: {"x": torch.randn(128, 1024), "labels": torch.arange(128) % 10}),
    "gpt2": Model(
        _of_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=384, n_layer=2, n_head=4,
                         n_positions=64, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0,
                         resid_pdrop=0.0, use_cache=False),
        _words,
    ),
    "vit": Model(
        _of_transformers("ViTForImageClassification", "ViTConfig", hidden_size=384, intermediate_size=1536,
                         num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, num_labels=10,
                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        lambda: _images("pixel_values"),
    ),
    "conv": Model(_conv, _images),
    "moe": Model(
        _of_transformers("MixtralForCausalLM", "MixtralConfig", **{**DECODER, "num_hidden_layers": 2},
                         intermediate_size=512, num_key_value_heads=2, num_local_experts=4),
        _words,
    ),
    "t5": Model(
        _of_transformers("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=192, d_ff=768,
                         num_layers=2, num_heads=4, d_kv=48, use_cache=False, decoder_start_token_id=0,
                         dropout_rate=0.0),
        _words,
    ),
    "embedding": Model(
        Tables, lambda: {"x": torch.randint(16384, (128, 8)), "labels": torch.arange(128) % 10}
    ),
    "lstm": Model(
        Sequences, lambda: {name: torch.randint(WORDS, (ROWS, 8)) for name in ("x", "labels")}
    ),
    "unet": Model(UNet, lambda: {"x": torch.randn(4, 3, 32, 32), "labels": torch.randn(4, 3, 32, 32)}),
    "wide": Model(
        WideAndDeep,
        lambda: {
            "x": torch.randint(20_000, (64, 8)), "crossed": torch.randint(200_000, (64, 8)),
            "labels": torch.arange(64) % 4,
        },
    ),
}  # fmt: skip
