"""Freezes layers as they settle: the pipeline gets shorter, and its ranks become more copies of it (PipeTransformer).

    python examples/pipe_transformer.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/pipe_transformer.py        # four processes
    python examples/pipe_transformer.py --check                     # also trains on one device, and compares losses

A stack of layers learns to add two numbers on a clock. After every epoch layers are frozen from below, up to
the one that gradients have changed least. When half of the layers are left to train, so are half of the stages.
"""

import copy
import sys

import torch
from torch import Tensor, nn

import sbpflow as flow

RANKS, LAYERS, WIDTH, HOURS, EPOCHS, STEPS, ALPHA = 4, 8, 64, 16, 6, 12, 0.3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return made


class Clock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(HOURS, WIDTH), nn.Embedding(HOURS, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, HOURS)

    def forward(self, hours: Tensor) -> Tensor:
        made: Tensor = self.head(self.layers(self.first(hours[:, 0]) + self.second(hours[:, 1])))
        return made


def loss_fn(model: nn.Module, hours: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(hours), hours.sum(1) % HOURS)


def plan(stages: int) -> str:
    if stages == 1:
        return f"grid cpu:[0-{RANKS - 1}] as (data={RANKS})\ninput hours <- data=S(0)\n"
    grid = f"grid cpu:[0-{RANKS - 1}] as (pipe={stages}, data={RANKS // stages})\ninput hours <- data=S(0)\n"
    return grid + f"pipe layers over pipe by 1f1b, {2 * stages} micro-batches\n"


def settled(model: Clock, before: list[Tensor], frozen: int) -> int:
    """How many layers are to be frozen: up to the one that gradients have changed least, and no more than a share of
    the rest."""
    now = [torch.cat([p.detach().full_tensor().flatten() for p in layer.parameters()]) for layer in model.layers]  # type: ignore[attr-defined]
    changes = [float((one - other).norm()) for one, other in zip(now, before, strict=True)]
    before[:] = now
    least = frozen + changes[frozen:].index(min(changes[frozen:])) + 1
    return min(least, frozen + int(ALPHA * (LAYERS - frozen)))


def freeze(model: Clock, layers: int) -> None:
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    for layer in list(model.layers)[:layers]:
        layer.requires_grad_(False)


def main() -> None:
    torch.manual_seed(0)
    model = Clock()
    alone, adams = copy.deepcopy(model), []
    for each in (model, alone):
        adams.append(torch.optim.AdamW(each.parameters(), lr=3e-3))
    before = [torch.cat([p.detach().flatten() for p in layer.parameters()]) for layer in model.layers]
    stages, frozen, worst = RANKS, 0, 0.0
    step = flow.compile(model, loss_fn, adams[0], plan=plan(stages))
    for epoch in range(EPOCHS):
        sent = 0
        for at in range(STEPS):
            hours = torch.randint(HOURS, (64, 2), generator=torch.Generator().manual_seed(epoch * STEPS + at))
            with flow.record() as moves:
                loss = step(hours).item()
            sent += sum(move.boxing.total for move in moves if move.op.startswith("moved"))
            if "--check" in sys.argv:
                wanted = loss_fn(alone, hours)
                wanted.backward()  # type: ignore[no-untyped-call]
                adams[1].step()
                adams[1].zero_grad()
                worst = max(worst, abs(loss - wanted.item()))
        shape = f"{stages} stage{'s' * (stages > 1)} x {RANKS // stages}"
        if flow.init().rank in (None, 0):
            print(f"epoch {epoch}  {shape}  {frozen} of {LAYERS} layers frozen  loss {loss:.4f}  {sent} bytes moved")
        frozen = settled(model, before, frozen)
        freeze(model, frozen)
        freeze(alone, frozen)
        if stages > 1 and (LAYERS - frozen) * RANKS <= LAYERS * stages // 2:
            stages //= 2
            step.move(plan=plan(stages))
    if "--check" in sys.argv:
        assert worst < 1e-4, worst
        print("every loss is that of one device")


if __name__ == "__main__":
    main()
