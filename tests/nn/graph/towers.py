"""A model of two towers: an encoder, and a decoder that reads what it made in each of its layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LENGTH", "WIDTH", "Translator", "Twins", "pairs", "translated", "twin_loss"]

WIDTH, LENGTH, WORDS = 8, 5, 20


class Reader(nn.Module):
    """A layer of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        y: Tensor = x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
        return y


class Writer(nn.Module):
    """A layer of the decoder; the first makes how far words look back, and hands it to the others."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.memory = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.far = nn.Embedding(LENGTH, 1) if first else None

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.far is not None:
            order = torch.arange(LENGTH)
            back = (order[:, None] - order[None]).clamp(min=0)
            bias = self.far(back).squeeze(-1).masked_fill(order[:, None] < order[None], float("-inf"))
        assert bias is not None
        query, key, value = self.qkv(x).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=bias))
        keys, values = self.memory(memory).chunk(2, -1)
        return x + F.scaled_dot_product_attention(self.query(x), keys, values, attn_mask=mask), bias


class Translator(nn.Module):
    """Words that both towers and the head share, so many layers of each, and masks of what is to be read."""

    def __init__(self, readers: int = 2, writers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.norm = nn.ModuleList(Reader() for _ in range(readers)), nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Writer(not n) for n in range(writers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, text: Tensor, said: Tensor) -> Tensor:
        mask = (text > 0)[:, None]
        x, y, bias = self.words(text), self.words(F.pad(said[:, :-1], (1, 0))), None
        for reader in self.encoder:
            x = reader(x, mask)
        memory = self.norm(x)
        for writer in self.decoder:
            y, bias = writer(y, memory, mask, bias)
        logits: Tensor = self.head(y)
        return logits


class Twins(nn.Module):
    """Two towers side by side, whose results meet behind them."""

    def __init__(self, left: int = 2, right: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)) for n in (left, right)
        )

    def forward(self, text: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        x, y = (F.one_hot(words, WORDS).sum(1)[:, :WIDTH].to(torch.float64) for words in (text, said))
        for left in self.left:
            x = left(x)
        for right in self.right:
            y = right(y)
        return x, y


def translated(model: nn.Module, text: Tensor, said: Tensor) -> Tensor:
    return F.cross_entropy(model(text, said).flatten(0, 1), said.flatten())


def twin_loss(model: nn.Module, text: Tensor, said: Tensor) -> Tensor:
    """How far each pair is apart."""
    x, y = model(text, said)
    return (1 - F.cosine_similarity(x, y)).mean()


def pairs(at: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Texts with zeros at their ends, which nobody is to read, and what is to be said."""
    draw = torch.Generator().manual_seed(at)
    text, said = (torch.randint(1, WORDS, (rows, LENGTH), generator=draw) for _ in range(2))
    text[1::2, -2:] = 0
    return text, said
