"""DiLoCo: groups of ranks train apart for some steps, then an outer optimizer steps by how far they came on average.

    python examples/diloco.py                             # one process plays four ranks
    torchrun --nproc-per-node 4 examples/diloco.py        # four processes
    python examples/diloco.py --check                     # also: one inner step of SGD is a data parallel step

The weights of the groups are addends along `data`. So `flow.nn.meet` brings their mean to pieces of an outer model by a
reduce_scatter, and the outer model's weights back to the groups. With parts, a layer is brought together at a time.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import B, S

GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))
GROUPS = [GRID.at(data=i) for i in range(2)]
INNER, OUTER, ROWS = 8, 12, 32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sin().sum(1, keepdim=True)


def sent(moves: flow.boxing.Moves) -> int:
    return sum(move.boxing.total for move in moves) // GRID.size


class Apart:
    """A model of each group with an optimizer of its own, and the outer model in pieces with one too."""

    def __init__(self, inner: type[torch.optim.Optimizer], rate: float, outer: dict[str, float | bool]) -> None:
        whole = net()
        self.models = [flow.nn.to_global(copy.deepcopy(whole), group) for group in GROUPS]
        self.model = flow.nn.to_global(whole, GRID, lambda name, x: {"data": S(0), "tensor": B})
        optimizers = [inner(model.parameters(), lr=rate) for model in self.models]  # type: ignore[call-arg]
        self.steps = [
            flow.compile(model, loss_fn, optimizer, placement=group)
            for model, optimizer, group in zip(self.models, optimizers, GROUPS, strict=True)
        ]
        self.outer = torch.optim.SGD(self.model.parameters(), **outer)  # type: ignore[arg-type]

    def train(self, seed: int) -> list[float]:
        """An inner step of each group, on a batch of its own."""
        losses = [step(*batch(2 * seed + i)) for i, step in enumerate(self.steps)]
        return [loss.full_tensor().item() for loss in losses]

    def meet(self, part: str = "") -> None:
        """The outer step of a part of the model: towards the mean of the groups, and to all of them."""
        flow.nn.meet(self.model, self.models, self.outer, axis="data", part=part)


def main() -> None:
    apart = Apart(torch.optim.AdamW, 3e-3, {"lr": 0.7, "momentum": 0.9, "nesterov": True})
    layers = [name for name, layer in apart.model.named_children() if [*layer.parameters()]]
    first, moves = 0 in flow.boxing.owned(GRID), flow.boxing.Moves()
    for at in range(OUTER * INNER):
        losses = apart.train(at)
        if at < OUTER * INNER // 2:  # all of it at once
            if at % INNER == INNER - 1:
                with flow.record() as moves:
                    apart.meet()
        elif at % (INNER // 2) == 0:  # or streamed, a layer at a time
            with flow.record() as moves:
                apart.meet(layers[at // (INNER // 2) % len(layers)])
        if first and at % 19 == 0:
            print(f"step {at:2}  losses {losses[0]:.5f} {losses[1]:.5f}, last met by {sent(moves)} bytes a rank")
    if "--check" in sys.argv:
        apart, one = Apart(torch.optim.SGD, 0.1, {"lr": 1.0}), net()
        alone = torch.optim.SGD(one.parameters(), lr=0.1)
        for at in range(4):
            apart.train(at)
            apart.meet()
            alone.zero_grad()
            loss_fn(one, *map(torch.cat, zip(batch(2 * at), batch(2 * at + 1), strict=True))).backward()  # type: ignore[no-untyped-call]
            alone.step()
        pairs = zip(apart.model.parameters(), one.parameters(), strict=True)
        far = max((x.full_tensor() - y).abs().max().item() for x, y in pairs)  # type: ignore[attr-defined]
        if first:
            print(f"largest difference from data parallel: {far:.1e}")
        sys.exit(far > 1e-6)


if __name__ == "__main__":
    main()
