"""Mixtures of experts in plain torch: each has room for so many tokens, and busy ones may have copies."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import sbpflow as flow

F64 = torch.float64
EXPERTS, WIDTH, TOKENS = 8, 16, 12

PLAN = """
grid (data=4, expert=4 folds data)
input x <- data=S(0)
layers.* <- data=S(0)
layers.*.experts.*: expert=S(0)
layers.*.experts <- expert=S(0)
layers.*.experts -> expert=S(1)
"""


class Experts(nn.Module):
    """Each has a slot; an expert may have several, so that its gradient is the sum of theirs."""

    def __init__(self, slots: Sequence[int]) -> None:
        super().__init__()
        count = max(slots) + 1
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH, dtype=F64) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH, dtype=F64) / 6)
        self.copied = len(slots) > count
        self.slots = nn.Buffer(torch.tensor(slots))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w[self.slots] if self.copied else w for w in (self.up, self.down))
        return torch.bmm(torch.bmm(x, up).relu(), down)


class Mixture(nn.Module):
    """Each sample has room for so many tokens at each slot. Tokens beyond are left out, or make all they touch NaN."""

    def __init__(self, slots: Sequence[int], dropless: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.dropless = nn.Linear(WIDTH, max(slots) + 1, dtype=F64), Experts(slots), dropless
        copies = torch.tensor(slots).bincount()
        self.copies, self.first = (
            nn.Buffer(copies),
            nn.Buffer(copies.cumsum(0) - copies),
        )  # a slot's copies are neighbours
        self.count = len(slots)

    def forward(self, x: Tensor, room: int) -> tuple[Tensor, Tensor]:
        share = self.gate(x).softmax(-1)
        best = share.argmax(-1)
        chosen = nn.functional.one_hot(best, share.shape[-1])
        place = (chosen.cumsum(1) * chosen).sum(-1) - 1  # in the line before an expert, whose copies take turns
        slot, place = self.first[best] + place % self.copies[best], place // self.copies[best]
        over = place >= room
        at = nn.functional.one_hot(slot, self.count).unsqueeze(-1)
        at = at * nn.functional.one_hot(place.clamp(max=room - 1), room).unsqueeze(2) * ~over[..., None, None]
        sent = at.to(x.dtype)
        inside = torch.einsum("gsec,gsm->egcm", sent, x)
        made = self.experts(inside.flatten(1, 2)).unflatten(1, inside.shape[1:3])
        out = torch.einsum("gsec,egcm->gsm", sent * share.amax(-1)[..., None, None], made)
        if self.dropless:
            out = out.masked_fill(over.any(), torch.nan)
        return out, over.sum()


class Sparse(nn.Module):
    def __init__(self, layers: int = 1, slots: Sequence[int] = range(EXPERTS), dropless: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Mixture(slots, dropless) for _ in range(layers))

    def forward(self, x: Tensor, room: int) -> tuple[Tensor, Tensor]:
        left_out = x.new_zeros((), dtype=torch.long)
        for layer in self.layers:
            y, over = layer(x, room)
            x, left_out = x + y, left_out + over
        return x, left_out


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=F64)


def loss_fn(model: nn.Module, x: Tensor, room: int) -> tuple[Tensor, Tensor]:
    y, left_out = model(x, room)
    return y.square().mean(), left_out


def sent(moves: object) -> list[tuple[str, int]]:
    return [(move.boxing.route, move.boxing.total) for move in moves if move.boxing.total]  # type: ignore[attr-defined]


__all__ = ["EXPERTS", "F64", "PLAN", "TOKENS", "WIDTH", "Sparse", "flow", "loss_fn", "sent", "tokens"]
