"""The prologue of a step: cuts the batch into micro-batches and computes, once, what they need of the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ....placement.errors import SbpError
from ....placement.world import owned
from ....sbp import Layout
from ....sbp.logical import Logical, Source
from ..compiler.generated_calls import Shards, no_shards
from .attention import forget, reserved
from .batch import Batch, evaluated, together
from .rewrite import Known, Micro

__all__ = ["Before", "Pasts"]


class Before:
    """The arguments of the pieces of a batch. `micros` are their steps, in order, `groups` the pieces of each update.

    `held` tells the value of a buffer or constant; a step asks for each once.
    """

    def __init__(
        self,
        batch: Batch,
        micros: Sequence[Micro],
        groups: Sequence[Sequence[int]],
        held: Callable[[Source], Tensor],
        name: str,
    ) -> None:
        self.batch, self.micros, self.groups, self.held, self.name = batch, micros, groups, held, name
        self.asked: dict[str, Tensor] = {}  # what `held` told in this step
        self.constant: dict[str, Tensor] = {}  # what is made of no argument is made once for all steps

    def pieces(self, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The arguments of each piece, of the batch's."""
        pieces = self.batch.cut(given)
        for known in self.micros[0].known:
            value = self.constant.get(known.name)
            if value is None:
                value = self.known(known, given)
            for mine, piece in zip(pieces, self.batch.pieces, strict=True):
                mine[known.name] = self.batch.piece(value, known.dims, piece)
        for group in self.groups:
            self.shares([pieces[k] for k in group], group)
            self.totals([pieces[k] for k in group], group)
        self.asked.clear()
        return pieces

    def more(self, graph: Logical) -> dict[str, Tensor]:
        """The buffers and constants that a graph has use for, whole."""
        used = {n for op in graph.ops for n in op.inputs}
        sources = [s for n, s in enumerate(graph.sources) if n in used and s.kind in ("buffer", "constant")]
        for source in sources:
            if source.name not in self.asked:
                self.asked[source.name] = self.held(source)
        return {source.name: self.asked[source.name] for source in sources}

    def nothing(self) -> list[dict[str, Tensor]]:
        """The arguments of pieces on a rank that has no stage."""
        micro = self.micros[0]
        names = [each.name for some in (micro.known, micro.totals, micro.shares) for each in some]
        return [dict.fromkeys(names, torch.empty(0)) for _ in self.batch.pieces]

    def known(self, known: Known, given: Mapping[str, Tensor]) -> Tensor:
        """A value of the batch."""
        value = evaluated(known.graph, {**self.more(known.graph), **given})
        if known.hides and bool(_seen(value).triu(1).any()):
            raise SbpError(
                f"{self.name} cuts sequences into slices, and a mask {tuple(value.shape)} lets tokens see later ones\n"
                "  give it one that hides them, or leave slices= out"
            )
        if known.constant:
            self.constant[known.name] = value
        return value

    def shares(self, pieces: Sequence[dict[str, Tensor]], group: Sequence[int]) -> None:
        """Add to the arguments of an update's pieces which part of it each is."""
        cuts = [self.batch.pieces[k] for k in group]
        samples = sum(cut.sizes[0] for cut in cuts[:: self.batch.slices])
        for share in self.micros[0].shares:
            for piece, cut in zip(pieces, cuts, strict=True):
                parts = self.batch.shares(cut, samples)
                piece[share.name] = torch.tensor(prod(parts[axis] for axis in share.axes), dtype=share.dtype)

    def totals(self, pieces: Sequence[dict[str, Tensor]], group: Sequence[int]) -> None:
        """Add to the arguments of an update's pieces what must be known of all of them."""
        micros, cuts = [self.micros[k] for k in group], [self.batch.pieces[k] for k in group]
        for at, (name, graph, how) in enumerate(micros[0].totals):
            more = self.more(graph)
            graphs = [micro.totals[at].graph for micro in micros]
            found = [evaluated(own, {**more, **piece}) for own, piece in zip(graphs, pieces, strict=True)]
            total = together(found, how, self.batch, cuts)
            for piece in pieces:
                piece[name] = total


def _seen(mask: Tensor) -> Tensor:
    """Where a mask lets tokens through."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Pasts:
    """Where slices leave what later ones need, in one step: a number for each sequence, op and rank."""

    def __init__(self, batch: Batch, names: Sequence[str]) -> None:
        self.batch = batch
        of_sequence = [{name: reserved() for name in names} for _ in batch.pieces[:: batch.slices]]
        self.first = [of_sequence[k // batch.slices] for k in range(len(batch.pieces))]
        self.used: set[int] = set()

    def shards(self, k: int, name: str, layout: Layout) -> Shards:
        """The shards that tell ranks of a layout about a piece: their numbers, and where it begins."""
        first, start = self.first[k][name], self.batch.pieces[k].starts[-1]
        numbers = [first + rank for rank in owned(layout.placement)]
        self.used.update(numbers)
        return tuple([torch.tensor([number, start]) for number in numbers]) or no_shards(layout)

    def __enter__(self) -> "Pasts":
        return self

    def __exit__(self, *_: object) -> None:
        forget(self.used)
