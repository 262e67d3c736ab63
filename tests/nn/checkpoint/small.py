"""A small model with all that a model may hold, trained for a moment, and its checkpoint."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow

LINE = flow.placement("cpu", range(3))


class Net(nn.Module):
    """Tied weights, one without dims, one frozen, one that is not used, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.scale, self.idle = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(2))
        self.inner.bias.requires_grad_(False)
        self.register_buffer("order", torch.arange(6.0), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.inner(self.emb(words)) + self.order) * self.scale
        y: Tensor = self.head(x)
        return y

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.order.copy_(torch.arange(6.0))  # type: ignore[operator]


def loss(model: nn.Module, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(words), words)


def words(at: int) -> Tensor:
    return torch.randint(10, (12,), generator=torch.Generator().manual_seed(at))


def made(*, meta: bool = False, dtype: torch.dtype = torch.float64) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(3)
    with torch.device("meta" if meta else "cpu"):
        model = Net().to(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": trained[:2], "lr": 0.02}, {"params": trained[2:]}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *at: int) -> None:
    """In plain torch."""
    for number in at:
        loss(model, words(number)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path, step: int = 1, **more: Any) -> Path:
    """A checkpoint of so many steps."""
    model, optimizer = made()
    train(model, optimizer, *range(step))
    path = folder / f"step-{step}"
    flow.save(path, model, optimizer=optimizer, step=step, **more).wait()
    return path


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All of a plain model and optimizer, copied."""
    found: dict[str, Any] = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for at, group in enumerate(optimizer.param_groups):
            found |= {f"{at}.{key}": value for key, value in group.items() if key != "params"}
            for place, x in enumerate(group["params"]):
                state = optimizer.state.get(x, {})
                found |= {f"{at}.{place}.{key}": torch.as_tensor(v).clone() for key, v in state.items()}
    return found


def same(mine: dict[str, Any], others: dict[str, Any]) -> None:
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        alike = torch.equal(value, others[name]) if isinstance(value, Tensor) else value == others[name]
        assert alike, name
