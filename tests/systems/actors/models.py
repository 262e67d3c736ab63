"""A small pipeline that the tests of added actors open, and its data."""

from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow

__all__ = ["MANY", "ROWS", "WIDTH", "data", "layers", "piped", "square"]

MANY, ROWS, WIDTH = 8, 2, 6  # micro-batches, rows of each


def layers(stages: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)))


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def data(seed: int = 1, rows: int = MANY * ROWS) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, y


def piped(model: nn.Sequential, **options: Any) -> Any:
    """A step of the model, a layer a stage."""
    flow.nn.pipeline(model, [flow.placement("cpu", [rank]) for rank in range(len(model))])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return flow.compile(model, square, optimizer, **{"micro_batches": MANY, **options})
