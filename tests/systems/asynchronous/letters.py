"""A small real task: a model of bytes learns this repository's licence, which never changes."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import sbpflow as flow

__all__ = ["Reader", "held_out_loss", "letters", "reader", "read_loss"]

BACK, WIDTH, LAYERS = 6, 48, 4
LICENCE = Path(__file__).resolve().parents[3] / "LICENSE"


class Layer(nn.Module):
    """A residual layer on what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Reader(nn.Module):
    """Guesses the byte behind the last few."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.first = nn.Embedding(128, 16), nn.Linear(16 * BACK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, text: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.first(self.bytes(text).flatten(1))))
        return y


def reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


def read_loss(model: nn.Module, text: Tensor, following: Tensor) -> Tensor:
    return cross_entropy(model(text), following)


@cache
def _text() -> Tensor:
    return torch.tensor(list(LICENCE.read_bytes())).clamp(max=127)


def letters(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """A batch of places in the first nine tenths of the text."""
    text = _text()
    return _at(torch.randint(len(text) * 9 // 10 - BACK, (samples,), generator=torch.Generator().manual_seed(seed)))


def held_out_loss(model: nn.Module) -> float:
    """The loss at places in the last tenth; of a global model, that of its weights on one device."""
    weights: dict[str, Any] = model.state_dict()
    alone = reader()
    alone.load_state_dict({n: x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for n, x in weights.items()})
    return read_loss(alone, *_at(torch.arange(len(_text()) * 9 // 10, len(_text()) - BACK, 3))).item()


def _at(places: Tensor) -> tuple[Tensor, Tensor]:
    text = _text()
    return text[places[:, None] + torch.arange(BACK)], text[places + BACK]
