"""A small model of equal layers with its loss and its batches: what is trained while ranks or stages change."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Layered", "batch", "loss_fn"]


class Layered(nn.Module):
    """So many layers of width 16, and a head."""

    def __init__(self, count: int, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer() for _ in range(count)))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.layers(x))
        return made


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def batch(at: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(at)
    return torch.randn(rows, 16, generator=draw).double(), torch.randint(8, (rows,), generator=draw)
