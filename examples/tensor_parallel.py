"""Tensor parallelism: a small transformer learns a rhyme by heart. Its heads and columns are split over two ranks.

python examples/tensor_parallel.py                          # one process plays four ranks
torchrun --nproc-per-node 4 examples/tensor_parallel.py     # four processes
"""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sbpflow as flow
from sbpflow import S

RHYME = "four ranks set out to learn a rhyme,\neach held a part, and all kept time.\n"
LETTERS = sorted(set(RHYME))
LENGTH, WIDTH, HEADS = 24, 32, 4
GRID = flow.placement("cpu", [[0, 1], [2, 3]], names=("data", "tensor"))

# Megatron's layout: the maps in are cut by columns (of x W^T), the maps out by rows. What is not named is B.
LAYOUT = {
    "[qkv].weight": {"tensor": S(0)},
    "up.*": {"tensor": S(0)},
    "out.weight": {"tensor": S(1)},
    "down.weight": {"tensor": S(1)},
}


class Reciter(nn.Module):
    """One transformer block between letters and letters."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2, self.head = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places.weight
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


def put(text: Tensor) -> Tensor:
    return flow.tensor(text, placement=GRID, sbp={"data": S(0)})


def main() -> None:
    torch.manual_seed(0)
    model = flow.nn.to_global(Reciter(), GRID, LAYOUT)
    criterion, optimizer = nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    letters = torch.tensor([LETTERS.index(letter) for letter in RHYME + RHYME[: LENGTH + 1]])
    windows = letters.unfold(0, LENGTH + 1, 1)[: len(RHYME)]  # every stretch of the rhyme, which begins anew at its end
    for step in range(101):
        with flow.record() as moves:
            batch = windows[torch.randperm(len(windows))[:32]]
            loss = criterion(model(put(batch[:, :-1])).flatten(0, 1), put(batch[:, 1:]).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = loss.item()
        if 0 in flow.boxing.owned(GRID) and step % 20 == 0:
            print(f"step {step:3}  loss {value:.4f}")
    text = letters[:LENGTH]
    with torch.no_grad():
        while len(text) < len(RHYME):
            text = torch.cat([text, model(put(text[None, -LENGTH:]))[0, -1].argmax().full_tensor()[None]])
    if 0 in flow.boxing.owned(GRID):  # one process prints
        steps = Counter(step for move in moves if move.bytes for step in move.route.split(", ")).items()
        print(f"\na step sent {moves.bytes} bytes to each rank, by {', '.join(f'{n} {step}' for step, n in steps)}")
        print(f"\nasked to go on after {RHYME[:LENGTH]!r}:\n\n" + "".join(LETTERS[i] for i in text.tolist()))


if __name__ == "__main__":
    main()
