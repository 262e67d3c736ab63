"""A GPT that learns a page of prose by characters, on four ranks. Nobody says how its tensors are to lie.

    python examples/gpt.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/gpt.py        # four processes
    python examples/gpt.py --check                     # also trains it on one device, and compares

The whole step is captured, planned and run as one graph; its picture goes to out/gpt.svg.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sbpflow as flow

RANKS = flow.placement("cpu:[0-3] as (data=2, tensor=2)")
WIDTH, HEADS, LAYERS, LENGTH, ROWS = 64, 4, 2, 32, 32
TEXT = Path(__file__).with_name("gpt.txt").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.register_buffer("order", torch.arange(LENGTH))

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.letters(text) + self.places(self.order)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def batches(epochs: int) -> Iterator[list[Tensor]]:
    """Stretches of the text, and the same stretches one letter on."""
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    rows = letters[: len(letters) // 8 * 8].unfold(0, LENGTH + 1, 8)
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), ROWS, shuffle=True, drop_last=True)
    for _ in range(epochs):
        yield from loader


def train(epochs: int) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = flow.compile(model, lambda model, *batch: model(*batch), optimizer, placement=RANKS)
    start, losses = time.perf_counter(), []
    for text, following in batches(epochs):
        losses.append(step(text, following).item())
        if len(losses) % 20 == 1 and 0 in flow.boxing.owned(RANKS):
            speed = len(losses) * ROWS * LENGTH / (time.perf_counter() - start)
            print(f"step {len(losses):3}  loss {losses[-1]:.4f}  {speed:7.0f} tokens/s")
    if 0 in flow.boxing.owned(RANKS):
        Path("out").mkdir(exist_ok=True)
        print(f"drew {step.draw('out/gpt.svg')}")
    return losses


def train_alone(epochs: int) -> list[float]:
    """The same in plain torch."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches(epochs):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    losses = train(epochs=8)
    if "--check" in sys.argv:
        apart = max(abs(a - b) for a, b in zip(losses, train_alone(epochs=8), strict=True))
        print(f"largest difference of a loss from one device: {apart:.1e}")
        sys.exit(apart > 1e-3)  # rounding grows from step to step
