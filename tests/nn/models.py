"""Small models in plain torch, which know nothing of placements, and data for them."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "ConvNet", "Perceptron", "Transformer", "batches"]

Batch: TypeAlias = tuple[Tensor, Tensor]
WORDS, LENGTH, WIDTH = 12, 6, 8  # of the transformer: vocabulary, positions, features


class Perceptron(nn.Module):
    """Four linear layers, a regression. Between the halves is a place where a pipeline changes ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh())
        self.between: nn.Module = nn.Identity()
        self.last = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3))

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.between(self.first(x))), wanted)


class ConvNet(nn.Module):
    """Two convolutions with batch norm, a classification of 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Linear(6, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = F.max_pool2d(self.second(self.first(images)), 3).flatten(1)
        return F.cross_entropy(self.head(features), labels)


class Attention(nn.Module):
    """Causal self-attention; the four weights are apart, so that heads can be split by columns of q, k, v."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (way(x).view(rows, length, self.heads, -1).transpose(1, 2) for way in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer block of the usual kind, norms before."""

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention(heads)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x


class Transformer(nn.Module):
    """A language model of two blocks."""

    def __init__(self, heads: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(heads, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": Perceptron,
    "convnet": ConvNet,
    "transformer": Transformer,
    "transformer without dropout": partial(Transformer, dropout=0.0),
}


def batches(model: str, rows: int, dtype: torch.dtype = torch.float64, count: int = 8) -> Iterator[Batch]:
    """The same data whenever the same is asked."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        if model == "perceptron":
            x = torch.randn(rows, 5, generator=draw, dtype=torch.float64).to(dtype)
            yield x, torch.stack([x.sum(1).sin(), x.amax(1), x[:, 0] * x[:, 1]], 1)
        elif model == "convnet":
            labels = torch.randint(4, (rows,), generator=draw)
            noise = torch.randn(rows, 2, 8, 8, generator=draw, dtype=torch.float64)
            yield (noise + labels[:, None, None, None]).to(dtype), labels
        else:
            text = (torch.randint(WORDS, (rows, 1), generator=draw) + torch.arange(LENGTH + 1)) % WORDS
            yield text[:, :-1], text[:, 1:]
