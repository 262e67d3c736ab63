"""A GPT in a pipeline: its blocks lie on stages, and micro-batches go through these one behind the other.

    python examples/pipeline.py                            # one process plays two stages
    torchrun --nproc-per-node 2 examples/pipeline.py       # two processes, a stage each
    torchrun --nproc-per-node 4 examples/pipeline.py       # four stages
    python examples/pipeline.py zb_h1                      # another schedule, as interleaved, zb_v or gpipe
    python examples/pipeline.py --check                    # also trains it on one device, and compares

The schedule is drawn in out/schedule.svg before anything runs, the graph of a micro-batch in out/pipeline.svg, and what
the last step did in out/timeline.json, for ui.perfetto.dev.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import sbpflow as flow

STAGES = [flow.placement("cpu", [rank]) for rank in range(flow.init().size or 2)]
SCHEDULE = next((word for word in sys.argv[1:] if not word.startswith("-")), "1f1b")
MICRO_BATCHES, EPOCHS = 8, 4
WIDTH, HEADS, LAYERS, LENGTH, ROWS = 64, 4, 4, 32, 32
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
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS), bias=False)

    def forward(self, text: Tensor, following: Tensor) -> Tensor:
        x = self.blocks(self.letters(text) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def batches() -> Iterator[list[Tensor]]:
    """Stretches of the text, and the same stretches one letter on."""
    letters = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    rows = letters[: len(letters) // 8 * 8].unfold(0, LENGTH + 1, 8)
    loader = DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), ROWS, shuffle=True, drop_last=True)
    for _ in range(EPOCHS):
        yield from loader


def train() -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    flow.nn.pipeline(model.blocks, STAGES, SCHEDULE)  # the layers before and behind lie where these begin and end
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = flow.compile(
        model, lambda model, *batch: model(*batch), optimizer, micro_batches=MICRO_BATCHES, schedule=SCHEDULE
    )
    losses = []
    for batch in batches():
        losses.append(step(*batch).item())
        if len(losses) == 1 or len(losses) % 12 == 0:
            say(f"step {len(losses):3}  loss {losses[-1]:.4f}")
    timeline = step.timeline("out/timeline.json")  # all processes ask, and the first is told
    if timeline is not None:
        say(f"\nthe last step, as it was:\n{timeline.text(width=96)}\n\n{timeline.summary()}\n")
        say(f"drew {step.draw('out/pipeline.svg')}, wrote out/timeline.json")
    return losses


def train_alone() -> list[float]:
    """The same in plain torch."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in batches():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def say(text: str) -> None:
    if flow.boxing.owned(STAGES[0]):  # one process prints
        print(text)


if __name__ == "__main__":
    schedule = flow.actors.published(SCHEDULE)
    shown = schedule.show(len(STAGES), MICRO_BATCHES)
    say(f"{shown}\ndrew {shown.draw('out/schedule.svg')}\n")
    losses = train()
    if "--check" in sys.argv:
        apart = max(abs(a - b) for a, b in zip(losses, train_alone(), strict=True))
        say(f"largest difference of a loss from one device: {apart:.1e}")
        sys.exit(apart > 1e-3)  # rounding grows from step to step
