"""Low rank: a matrix as the product of two thin ones, which are sums over ranks themselves (PowerSGD).

M = gradient + error        on each rank
P = orthogonal(sum of M Q)  one sum of rows x rank elements; Q is that of the step before, made orthogonal
Q = sum of M' P             one sum of columns x rank elements
P Q' is the sum of all M, as far as rank goes; M less this rank's part of it is the next error
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ..kept import KeptTensors
from .course import EncoderCourse, Summed
from .encoder import Encoder

__all__ = ["LowRankEncoder"]

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LowRankEncoder(Encoder):
    """Two factors of some rank. A tensor of less than two dims, or not `saves` times smaller so, is summed whole.

    With `warm` each step goes on from the factor that the last one found; the first is drawn by `seed`."""

    rank: int = 4
    saves: float = 2.0
    warm: bool = True
    seed: int = 0

    name: ClassVar[str] = "low_rank"

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1 or self.twice:
            what = "twice=True" if self.twice else f"rank={self.rank!r}"
            raise SbpError(f"low_rank({what})\n  its factors are summed, and nothing is encoded twice; rank is from 1")

    def course(self, value: Tensor, kept: KeptTensors, ranks: int) -> EncoderCourse:
        rows = value.shape[0] if value.ndim > 1 else 0
        columns = value.numel() // rows if rows else 0
        rank = min(rows, columns, self.rank)
        if (rows + columns) * rank * self.saves >= rows * columns:
            return (yield Summed(value)), {}
        wanted = (value + kept["error"] if "error" in kept else value).reshape(rows, columns)
        basis = orthogonal(kept["basis"] if "basis" in kept else self.begin(columns, rank, value))
        left = orthogonal((yield Summed(wanted @ basis)))
        right = yield Summed(wanted.T @ left)
        whole = left @ right.T
        found = {"basis": right} if self.warm else {}
        if self.feedback:
            found["error"] = (wanted - whole / ranks).view(value.shape)
        return whole.view(value.shape), found

    def begin(self, columns: int, rank: int, like: Tensor) -> Tensor:
        """The first factor, the same on all ranks."""
        drawn = torch.randn(
            columns, rank, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float32, device="cpu"
        )
        return drawn.to(like.device, like.dtype)


def orthogonal(matrix: Tensor) -> Tensor:
    """Columns of length one, each at right angles to those before it; a column that depends on these is zero."""
    if matrix.shape[1] > 2 and matrix.dtype not in HALVES:
        columns: Tensor = torch.linalg.qr(matrix)[0]
        return columns
    done: list[Tensor] = []
    for column in matrix.float().unbind(1) if matrix.dtype in HALVES else matrix.unbind(1):
        for other in done:
            column = column - (other * column).sum() * other
        norm = column.norm()
        done.append(torch.where(norm > 0, column / norm, 0.0))
    return torch.stack(done, 1).to(matrix.dtype)
