"""The model that steps are timed on, a GPT in plain torch, its batches, and a step as one writes it by hand."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "Batch", "Size", "Step", "adamw", "agree", "batch", "loss_of", "made", "trainer"]

Step: TypeAlias = Callable[[], Tensor]  # one step of training; returns the loss
Batch: TypeAlias = tuple[Tensor, ...]  # tokens and targets
Region: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    vocabulary: int = 512

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, batch {self.batch} x {self.length}"


def as_it_is(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """A transformer block. With its weights split by hand, `enter` and `leave` are the collectives around these."""

    def __init__(self, size: Size, ranks: int, enter: Region, leave: Region) -> None:
        super().__init__()
        width, self.head = size.width, size.width // size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width // ranks, bias=False) for _ in range(3))
        self.out = nn.Linear(width // ranks, width, bias=False)
        self.up = nn.Linear(width, 4 * width // ranks, bias=False)
        self.down = nn.Linear(4 * width // ranks, width, bias=False)
        self.enter, self.leave = enter, leave

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.enter(self.norm1(x))
        q, k, v = (part(h).view(b, t, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.leave(self.out(a))
        h = self.enter(self.norm2(x))
        return x + self.leave(self.down(F.gelu(self.up(h))))


class GPT(nn.Module):
    """The whole model, or with `ranks` the part of it that one of them has, block by block."""

    def __init__(self, size: Size, ranks: int = 1, enter: Region = as_it_is, leave: Region = as_it_is) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size, ranks, enter, leave) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def made(size: Size) -> GPT:
    """The same weights each time."""
    torch.manual_seed(0)
    return GPT(size)


def batch(size: Size, device: str = "cpu") -> Batch:
    """The same tokens and targets each time."""
    source = torch.Generator().manual_seed(1)
    shape = size.batch, size.length
    if device == "meta":
        return tuple(torch.empty(shape, dtype=torch.long, device=device) for _ in range(2))
    return tuple(torch.randint(size.vocabulary, shape, generator=source) for _ in range(2))


def adamw(parameters: Iterable[Any], *, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)


def trainer(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, given: Batch) -> Step:
    """A step as one writes it in plain torch."""

    def step() -> Tensor:
        loss = loss_of(model, *given)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def agree(steps: dict[str, Callable[[], float]], first: str, what: str) -> None:
    """Run three steps of every way, and compare their losses."""
    expected = [steps[first]() for _ in range(3)]
    for way, step in steps.items():
        found = expected if way == first else [step() for _ in range(3)]
        for a, b in zip(found, expected, strict=True):
            assert abs(a - b) <= 1e-4 * abs(b), f"{what}: losses {found} by {way}, {expected} by {first}"
