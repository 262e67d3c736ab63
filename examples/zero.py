"""Sharded training (ZeRO, FSDP): weights, gradients and Adam's state are cut up, and each rank keeps a quarter.

    python examples/zero.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/zero.py        # four processes

A model learns to read the clock. It is trained twice from the same seed: with whole weights everywhere, and cut up.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import sbpflow as flow
from sbpflow import B, S

RANKS = flow.placement("cpu", range(4), names=("data",))
HOURS = 12


class Run(NamedTuple):
    losses: list[float]
    kept: int  # bytes on rank 0 for weights, gradients and the optimizer's state
    sent: int  # bytes to each rank in a step
    answers: list[int]


def clock() -> tuple[Tensor, Tensor]:
    """Every (hour, hours later), and the hour that it is then."""
    asked = torch.cartesian_prod(torch.arange(HOURS), torch.arange(HOURS))
    return asked, asked.sum(1) % HOURS


def kept(tensors: list[flow.GlobalTensor]) -> int:
    """The bytes of them that rank 0 holds."""
    lies = [tensor.layout_ for tensor in tensors]
    return sum(torch.Size(lie.local_shape(0)).numel() * lie.dtype.itemsize for lie in lies)


def train(sbp: flow.sbp.Sbp, steps: int = 80) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(HOURS, 16), nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, HOURS))
    flow.nn.to_global(model, RANKS, sbp)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked, right = (flow.tensor(whole, placement=RANKS, sbp=S(0)) for whole in clock())
    losses = []
    for _ in range(steps):
        with flow.record() as moves:
            loss = criterion(model(asked), right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    weights = list(model.parameters())
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    held = [*weights, *(weight.grad for weight in weights), *state]
    bytes_kept = kept([tensor for tensor in held if isinstance(tensor, flow.GlobalTensor)])
    return Run(losses, bytes_kept, moves.bytes, model(asked).argmax(1).tolist())


def main() -> None:
    whole, cut = train(B), train(S(0))
    if 0 not in flow.boxing.owned(RANKS):
        return  # one process prints
    print("loss at step  0         20        40        60        79        kept      sent a step")
    for name, run in (("whole  B", whole), ("cut S(0)", cut)):
        losses = "".join(f"{loss:<10.6f}" for loss in [*run.losses[::20], run.losses[-1]])
        print(f"{name}      {losses}{run.kept:<10}{run.sent}")
    print(f"\nthe same training with {cut.kept / whole.kept:.0%} of the bytes on each rank\n")
    for hour, later in ((9, 5), (11, 4), (10, 2)):
        print(f"{hour:2} o'clock and {later:2} hours later: {cut.answers[hour * HOURS + later] or 12} o'clock")


if __name__ == "__main__":
    main()
