"""Small models whose layers are stages, for recurrences that are written down beside them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import sbpflow as flow
from sbpflow.actors import Schedule

__all__ = ["WIDTH", "Odd", "layers", "numbers", "ranks", "squares", "staged", "whole"]

WIDTH = 8


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*made).double()


class Odd(nn.Module):
    """Two layers, of which weights are tied and a bias is frozen, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = layers(2), nn.Linear(2, 2)
        self.body[1][0].weight = self.body[0][0].weight  # type: ignore[index]
        self.body[0][0].bias.requires_grad_(False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y)


def numbers(samples: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(samples, WIDTH, generator=drawn).double() for _ in range(2))  # type: ignore[return-value]


def ranks(count: int) -> list[flow.Placement]:
    return [flow.placement("cpu", [rank]) for rank in range(count)]


def staged(model: nn.Sequential, schedule: str | Schedule, m: int, lr: float = 0.1, **options: Any) -> flow.nn.Graph:
    """A step of SGD with a layer on each rank."""
    flow.nn.pipeline(model, ranks(len(model)), schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return flow.compile(model, squares, optimizer, micro_batches=m, schedule=schedule, **options)


def whole(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def cut(x: Tensor, y: Tensor, m: int) -> Sequence[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(m), y.chunk(m), strict=True))
