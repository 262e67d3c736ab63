"""Three axes at once: eight ranks learn the calendar, as two stages of two times two.

python examples/three_d.py                          # one process plays eight ranks
torchrun --nproc-per-node 8 examples/three_d.py     # eight processes
torchrun --nproc-per-node 4 examples/three_d.py     # four: two stages of two, which share the batch

Blocks are cut into stages over `pipe`; on a stage the batch is cut over `data`, and wide layers over `tensor`.
"""

import re
from calendar import day_name
from collections import Counter
from datetime import date

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S

RANKS = flow.init().size or 8
GRID = flow.placement("cpu", torch.arange(RANKS).reshape(2, 2, -1).tolist(), names=("pipe", "data", "tensor"))
YEARS, MONTHS, DAYS = range(1950, 2050), range(12), list(day_name)
WIDTH, STEPS = 64, 41


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Calendar(nn.Module):
    """On which day a month of a year begins."""

    def __init__(self) -> None:
        super().__init__()
        self.years, self.months = nn.Embedding(len(YEARS), WIDTH), nn.Embedding(len(MONTHS), WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(DAYS))

    def forward(self, year: Tensor, month: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.years(year) + self.months(month))))  # type: ignore[no-any-return]


def calendar() -> tuple[Tensor, Tensor, Tensor]:
    year, month = torch.cartesian_prod(torch.arange(len(YEARS)), torch.arange(12)).unbind(1)
    days = [date(YEARS[y], m + 1, 1).weekday() for y in range(len(YEARS)) for m in MONTHS]
    return year, month, torch.tensor(days)


def loss_fn(model: nn.Module, year: Tensor, month: Tensor, day: Tensor) -> tuple[Tensor, Tensor]:
    guess = model(year, month)
    return F.cross_entropy(guess, day), guess.argmax(-1)


def main() -> None:
    torch.manual_seed(0)
    model = Calendar()
    flow.nn.pipeline(model.blocks, [GRID.at(pipe=0), GRID.at(pipe=1)])
    flow.nn.shard(model, {"blocks.*.up.*": {"tensor": S(0)}, "blocks.*.down.weight": {"tensor": S(1)}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = flow.compile(model, loss_fn, optimizer, micro_batches=4)  # how the batch lies is chosen
    batch = calendar()
    for number in range(STEPS):
        with flow.record() as moves:
            loss, guess = step(*batch)
        value = loss.item()
        if 0 in flow.boxing.owned(GRID) and number % 20 == 0:
            print(f"step {number:3}  loss {value:.5f}")
    days = guess.tolist()
    if 0 not in flow.boxing.owned(GRID):
        return  # one process prints
    print("\nweights of one block, and what one rank has of them:")
    for name, weight in model.blocks[0].named_parameters():
        assert isinstance(weight, flow.GlobalTensor)
        print(f"  {name:12} {tuple(weight.shape)!s:10} {weight.sbp!s:10} {weight.layout_.local_shape(0)}")
    kinds = Counter(kind for m in moves if m.bytes for kind in re.findall(r"\w+ over \w+", str(m.boxing)))
    print("\non its stages a step took " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) + "\n")
    for year, month in ((1969, 7), (1989, 11), (2026, 1)):
        print(f"{date(year, month, 1):%B %Y} began on a {DAYS[days[(year - YEARS[0]) * 12 + month - 1]]}")


if __name__ == "__main__":
    main()
