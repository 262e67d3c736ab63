"""A program on played cards beside the same program on the host: its values are equal, and nothing races."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow

__all__ = ["Layer", "Net", "as_on_host", "batch", "cross_entropy", "steps", "whole"]

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return made


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


def as_on_host(program: Callable[[str], Sequence[Tensor]], near: float = 1e-12) -> None:
    """The program, which is given a kind of device, makes the same values on cards, and nothing races there."""
    host, card = (program(kind) for kind in ("cpu", "cuda"))
    gc.collect()  # a step's thread for files ends with the step
    torch.cuda.synchronize()
    assert len(host) == len(card)
    for one, other in zip(host, card, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=near, atol=near, equal_nan=True)


def net(layers: int = 4) -> Net:
    torch.manual_seed(3)
    with torch.device("cpu"):
        return Net(layers).double()


def batch(at: int, kind: str, rows: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(at)
    x = torch.randn(rows, WIDTH, generator=drawn, dtype=torch.float64)
    return x.to(kind), torch.randint(5, (rows,), generator=drawn).to(kind)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def whole(model: nn.Module) -> list[Tensor]:
    """All values of a model, as one tensor each."""
    every = model.state_dict().values()
    return [(x.full_tensor() if isinstance(x, flow.GlobalTensor) else x).detach().clone() for x in every]


def steps(model: nn.Module, step: Any, kind: str, count: int = 3, rows: int = 8) -> list[Tensor]:
    """Losses of some steps, the weights behind each, and those at the end."""
    found: list[Tensor] = []
    for at in range(count):
        found.append(step(*batch(at, kind, rows)))
        if at == 0:
            found += whole(model)
    return [*(x.full_tensor() if isinstance(x, flow.GlobalTensor) else x for x in found), *whole(model)]
