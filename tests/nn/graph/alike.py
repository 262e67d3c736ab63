"""A net, its data, and a step of it as a graph and in plain torch, to be held against each other."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow

LINE = flow.placement("cpu", range(4))
GRID = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
F64 = torch.float64
WHERE = pytest.mark.parametrize("where", [LINE, GRID], ids=["line", "grid"])


def net(dtype: torch.dtype = F64) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batch(rows: int = 8, at: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 + at)
    return torch.randn(rows, 4, dtype=F64, generator=draw).to(dtype), torch.randint(3, (rows,), generator=draw)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def whole(value: Any) -> Any:
    if isinstance(value, flow.GlobalTensor):
        return value.detach().full_tensor()
    return value.detach() if isinstance(value, Tensor) else value


def same(mine: Any, one: Any, tolerance: float = 1e-10) -> None:
    """Sums are made in another order."""
    torch.testing.assert_close(whole(mine), whole(one), rtol=tolerance, atol=tolerance)


def same_model(mine: nn.Module, one: nn.Module, tolerance: float = 1e-10) -> None:
    held, wanted = mine.state_dict(), one.state_dict()
    assert list(held) == list(wanted)
    for name, value in wanted.items():
        same(held[name], value, tolerance)


def same_grads(mine: nn.Module, one: nn.Module) -> None:
    for (name, p), q in zip(mine.named_parameters(), one.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            same(p.grad, q.grad)


def compiled(graph: flow.nn.Graph) -> int:
    """How many steps were captured."""
    return sum(map(len, graph._steps.values()))


Optimize = Callable[[nn.Module], torch.optim.Optimizer]


def eager(
    model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, *args: Any, clip: float | None = None
) -> Any:
    """The step on one device."""
    result = loss(model, *args)
    first = result[0] if isinstance(result, tuple) else result
    first.backward()
    if optimizer is not None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return result


def trains_alike(
    model: nn.Module,
    where: flow.Placement,
    make: Optimize = sgd,
    loss: Any = loss_fn,
    steps: int = 3,
    tolerance: float = 1e-10,
    **options: Any,
) -> flow.nn.Graph:
    one = copy.deepcopy(model)
    ones, mine = make(one), make(model)
    step = flow.compile(model, loss, mine, placement=where, **options)
    clip = options.get("clip_grad_norm") or 0
    for at in range(steps):
        x, y = batch(at=at)
        x = x.to(next(one.parameters()).dtype)
        same(step(x, y), eager(one, loss, ones, x, y, clip=clip), tolerance)
    same_model(model, one, tolerance)
    return step


class Noisy(nn.Module):
    """Dropout and a batch norm: train and eval differ, and buffers change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        out: Tensor = self.last(self.drop(self.norm(self.first(x))))
        return out
