"""A small GPT that the systems are tried on, and steps of it held to one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow

__all__ = ["GPT", "HEADS", "LENGTH", "Block", "WIDTH", "WORDS", "batches", "gpt", "loss_fn", "same_as_one_device"]

WORDS, WIDTH, LENGTH, HEADS = 64, 32, 8, 4


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return made


class GPT(nn.Module):
    def __init__(self, layers: int = 2, width: int = WIDTH, words: int = WORDS) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(self.norm(x))
        return made


def gpt(layers: int = 2) -> GPT:
    torch.manual_seed(0)
    return GPT(layers).double()


def loss_fn(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), labels.flatten())


def batches(count: int, rows: int = 8, length: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        (torch.randint(WORDS, (rows, length), generator=drawn), torch.randint(WORDS, (rows, length), generator=drawn))
        for _ in range(count)
    ]


def same_as_one_device(
    model: nn.Module,
    *,
    loss: Callable[..., Tensor] = loss_fn,
    given: Sequence[tuple[Tensor, ...]] | None = None,
    near: float = 1e-9,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> Any:
    """The compiled step, after it has trained as the same model does on one device."""
    alone = copy.deepcopy(model)
    one = optimizer(alone.parameters(), lr=0.1)
    step = flow.compile(model, loss, optimizer(model.parameters(), lr=0.1), **options)
    for batch in given if given is not None else batches(3):
        one.zero_grad()
        wanted = loss(alone, *batch)
        wanted.backward()  # type: ignore[no-untyped-call]
        one.step()
        torch.testing.assert_close(step(*batch).full_tensor(), wanted.detach(), rtol=near, atol=near)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, flow.GlobalTensor)
        torch.testing.assert_close(mine.full_tensor(), other, rtol=near, atol=near)
    return step
