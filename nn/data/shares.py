"""Shares: which rows of a batch, and of each sample which part, the ranks of this process hold."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp import Layout, SbpLike, Split
from ...sbp.signature import Partial, Sbp
from ...sbp.state import Factors, Spans, State, spans, trim
from ...sbp.text import signature

__all__ = ["BatchShares", "shares_of"]


@dataclass(frozen=True)
class BatchShares:
    """The layout of batches: samples along dim 0, in runs of `micro_batches` where there are several."""

    placement: Placement
    entries: tuple[Sbp, ...]
    micro_batches: int = 1

    @cached_property
    def ranks(self) -> int:
        """Among how many ranks the samples of a batch are shared out."""
        return int(np.prod([self.placement.shape[axis] for axis in self.axes(0)], dtype=int))

    def axes(self, dim: int) -> Factors:
        """The axes that cut a dim."""
        cuts = ((axis, entry) for axis, entry in enumerate(self.entries) if self.placement.shape[axis] > 1)
        return tuple(axis for axis, entry in cuts if isinstance(entry, Split) and entry.dim == dim)

    def factors(self, size: int) -> Factors:
        """The cut of a batch's samples: each micro-batch by itself, if all are of one size."""
        even = self.micro_batches > 1 and size % self.micro_batches == 0 and size // self.micro_batches >= self.ranks
        return trim((-self.micro_batches, *self.axes(0))) if even else self.axes(0)

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """The layout of a batch's tensor; signatures of dims that it does not have are B."""
        dims = (self.factors(shape[0]), *(self.axes(d) for d in range(1, len(shape))))
        return Layout(self.placement, State(dims), shape, dtype)

    def rows_of(self, rank: int, size: int) -> Spans:
        """The rows of a batch that a rank holds."""
        return spans(size, self.factors(size), self.placement.coords(rank), self.placement.shape)

    def rows(self, size: int) -> NDArray[np.int64]:
        """The rows of a batch that the ranks of this process hold together, ascending."""
        held = np.zeros(size, bool)
        for rank in owned(self.placement):
            for lo, hi in self.rows_of(rank, size):
                held[lo:hi] = True
        return np.flatnonzero(held)

    def part(self, length: int) -> tuple[int, int]:
        """The part of a sample's first dim, of this length, that covers what the ranks of this process hold."""
        axes = self.axes(1)
        held = [span for rank in owned(self.placement) for span in self._cut(length, axes, rank)]
        return (min(lo for lo, _ in held), max(hi for _, hi in held)) if held else (0, 0)

    def _cut(self, length: int, axes: Factors, rank: int) -> Spans:
        return spans(length, axes, self.placement.coords(rank), self.placement.shape)

    def shard(self, value: Tensor, of: Layout, rank: int, rows: NDArray[np.int64], part: tuple[int, int]) -> Tensor:
        """A rank's shard of these rows that were read; of dim 1 it takes `part` if the layout has more."""
        mine = np.concatenate([np.arange(lo, hi) for lo, hi in self.rows_of(rank, of.shape[0])] or [rows[:0]])
        at = np.searchsorted(rows, mine)
        one_run = len(at) == 0 or at[-1] - at[0] + 1 == len(at)
        found = value[int(at[0]) : int(at[0]) + len(at)] if one_run and len(at) else value[torch.from_numpy(at)]
        for d, each in enumerate(of.spans(rank)[1:], 1):
            first = part[0] if d == 1 and value.shape[1] != of.shape[1] else 0
            lo, hi = each[0] if each else (first, first)
            found = found.narrow(d, lo - first, hi - lo)
        return found


def shares_of(placement: Placement, sbp: SbpLike, micro_batches: int, batch_size: int) -> BatchShares:
    """The shares that a signature means, unless no batch can lie so."""
    asked = f"flow.data.shards(sbp={sbp!r})"
    entries = signature(sbp, placement)
    if any(isinstance(entry, Partial) for entry in entries):
        raise SbpError(
            f"{asked}: a batch is no sum of addends, and no rank has one\n"
            "  say S(0) for the axes over which samples are shared out, and B for those that all have them"
        )
    if any(isinstance(entry, Split) and entry.dim < 0 for entry in entries):
        raise SbpError(
            f"{asked}: tensors of a batch may have different numbers of dims\n"
            "  count dims from the front, as in S(1) for the tokens of each sample"
        )
    made = BatchShares(placement, entries, micro_batches)
    if batch_size < made.ranks * micro_batches:
        each = f" in {micro_batches} micro-batches" if micro_batches > 1 else ""
        raise SbpError(
            f"{asked}, batch_size={batch_size}: samples are shared out over {made.ranks} ranks{each}, "
            f"of which some would have none\n  batch_size counts all of them: give it {made.ranks * micro_batches} or "
            "a multiple, or split fewer axes"
        )
    return made
