"""Steps that are recorded as graphs of a card, beside the same steps as ever: used where a card is, or is played."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sbpflow as flow

__all__ = ["MODELS", "OPTIMIZERS", "Course", "course", "like", "rows", "squares", "whole"]

Loss = Callable[..., Tensor]


class Attending(nn.Module):
    """Two layers of a transformer with dropout, over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(4 * 16, 4)
    )


def rows(n: int) -> tuple[Tensor, ...]:
    return torch.sin(torch.arange(64.0) + n).reshape(8, 8), torch.cos(torch.arange(32.0) * n).reshape(8, 4)


def words(n: int) -> tuple[Tensor, ...]:
    tokens = (torch.arange(4 * 6) * (n + 3) % 16).reshape(4, 6)
    return tokens, tokens.roll(-1, 1)


def images(n: int) -> tuple[Tensor, ...]:
    return torch.sin(torch.arange(4.0 * 3 * 36) + n).reshape(4, 3, 6, 6), torch.cos(torch.arange(16.0) * n).reshape(
        4, 4
    )


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    made: Tensor = (model(x) - y).square().mean()
    return made


def crossed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def halves(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return nn.functional.mse_loss(model(x).float(), y)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]], Loss]] = {
    "mlp": (mlp, rows, squares),
    "transformer": (Attending, words, crossed),
    "convolutions": (pictures, images, squares),
    "autocast": (mlp, rows, halves),
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda held: torch.optim.AdamW(held, lr=torch.tensor(1e-2, device="cuda"), capturable=True),
    "adamw fused": lambda held: torch.optim.AdamW(held, lr=torch.tensor(1e-2, device="cuda"), fused=True),
    "adamw one by one": lambda held: torch.optim.AdamW(
        held, lr=torch.tensor(1e-2, device="cuda"), capturable=True, foreach=False
    ),
    "sgd": lambda held: torch.optim.SGD(held, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda held: torch.optim.RMSprop(held, lr=torch.tensor(1e-2, device="cuda"), capturable=True),
}


@dataclass(frozen=True)
class Course:
    """The values that steps have come to."""

    losses: Sequence[float]
    values: dict[str, Tensor]
    states: Sequence[Tensor]
    norms: Sequence[float]
    step: Any
    numbers: Tensor  # that are drawn behind them


def course(
    model: str,
    optimizer: str,
    plan: str,
    graph: bool,
    steps: int = 6,
    between: Callable[[int, Any, nn.Module, Any], object] | None = None,
    **options: Any,
) -> Course:
    """Some steps of a model, with the rate halved at each where it lies on the card."""
    make, batch, loss = MODELS[model]
    torch.manual_seed(0)
    with torch.device("cpu"):
        net = make()
    net = copy.deepcopy(net).cuda()
    adam = OPTIMIZERS[optimizer](net.parameters())
    step = flow.compile(net, loss, adam, plan=plan, cuda_graph=graph, **options)
    torch.manual_seed(1)
    losses, norms = [], []
    for n in range(steps):
        losses.append(step(*(x.cuda() for x in batch(n))).item())
        if "clip_grad_norm" in options:
            norms.append(step.grad_norm.item())
        for group in adam.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].mul_(0.5)
        if between is not None:
            between(n, step, net, adam)
    numbers = torch.rand(4, device="cuda")
    values = {name: whole(value) for name, value in net.state_dict().items()}
    held = [part for state in adam.state.values() for part in state.values() if isinstance(part, Tensor)]
    return Course(losses, values, [whole(part) for part in held], norms, step, numbers)


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, flow.GlobalTensor) else x).detach().clone()


def like(one: Course, other: Course) -> None:
    """Equal to the bit in all that they have come to."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert one.values.keys() == other.values.keys()
    for name, value in one.values.items():
        assert torch.equal(value, other.values[name]), name
    assert len(one.states) == len(other.states)
    assert all(map(torch.equal, one.states, other.states))
    assert torch.equal(one.numbers, other.numbers)
