"""Data parallelism: four ranks learn to tell the arms of a spiral apart, each from its share of the points.

python examples/mlp.py                              # one process plays four ranks
torchrun --nproc-per-node 4 examples/mlp.py         # four processes
"""

from math import pi

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S

RANKS = flow.placement("cpu", range(4), names=("data",))
POINTS, STEPS = 402, 250  # 402 points over 4 ranks are 101, 101, 100, 100


def spiral(points: int) -> tuple[Tensor, Tensor]:
    """Points (x, y) on two arms, and on which arm each lies."""
    arm = torch.arange(points) % 2
    far = torch.rand(points).sqrt()
    angle = 3 * pi * far + pi * arm
    return far[:, None] * torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(points, 2), arm


def drawing(model: nn.Module, columns: int = 64, rows: int = 24) -> str:
    """The model's answer for every place of the square, as letters."""
    x, y = torch.linspace(-1, 1, columns), torch.linspace(1, -1, rows)
    places = torch.stack([x.repeat(rows), y.repeat_interleave(columns)], 1)
    with torch.no_grad():
        arm = model(flow.tensor(places, placement=RANKS, sbp=S(0))).argmax(1)
    letters = [".#"[i] for i in arm.tolist()]
    return "\n".join("".join(letters[row * columns : (row + 1) * columns]) for row in range(rows))


def main() -> None:
    torch.manual_seed(0)
    first = 0 in flow.boxing.owned(RANKS)  # one process prints
    model = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 2))
    flow.nn.to_global(model, RANKS, B)  # every rank has all weights
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)

    points, arms = spiral(POINTS)
    x = flow.tensor(points, placement=RANKS, sbp=S(0))  # and its share of the points
    wanted = flow.tensor(arms, placement=RANKS, sbp=S(0))
    for step in range(STEPS):
        with flow.record() as moves:
            loss = criterion(model(x), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = loss.item()
        if first and (step % 50 == 0 or step == STEPS - 1):
            print(f"step {step:3}  loss {value:.4f}")

    picture = drawing(model)
    if first:
        print(f"\none step sent {moves.bytes} bytes to each rank, the gradients of the weights:")
        for move in moves:
            if move.bytes:
                print(f"  {move.op}: {tuple(move.boxing.src.shape)} {move.boxing}")
        print(f"\nthe two arms, as the model sees them:\n{picture}")


if __name__ == "__main__":
    main()
