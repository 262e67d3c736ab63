"""The prologue of a step: cuts the batch into micro-batches and computes, once, what they need of the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ....placement import Placement
from ....placement.errors import SbpError
from ....placement.world import device, owned
from ....sbp import Layout
from ....sbp.call import refs_in
from ....sbp.logical import Logical, Source
from ....sbp.state import Runs
from ...tensors.seeds import agree
from ..compiler.generated_calls import Shards, no_shards
from .attention import forget, reserved
from .batch import Batch, evaluated
from .micro import Known, MaskedPlaces, Micro

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
        where: Placement,
    ) -> None:
        self.batch, self.micros, self.held, self.name, self.where = batch, micros, held, name, where
        self.updates = [(group, batch.update(group), batch.rows(group)) for group in groups]
        self.asked: dict[str, Tensor] = {}  # what `held` told in this step
        self.constant: dict[tuple[str, Runs], Tensor] = {}  # values of no argument, made once for all steps

    def pieces(self, given: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The arguments of each piece, made of those of the batch."""
        pieces = self.batch.cut(given)
        for group, batch, rows in self.updates:
            mine = given
            if batch is not self.batch:
                mine = {path: self.batch.piece(x, self.batch.inputs[path], rows) for path, x in given.items()}
            values = self.drawn(group)
            for k, piece in zip(group, batch.pieces, strict=True):
                for known in self.micros[k].known:
                    if known.name not in values:
                        values[known.name] = self.known(known, mine, batch)
                    pieces[k][known.name] = batch.piece(values[known.name], known.dims, piece)
                shares = batch.shares(piece)
                for name, axes, dtype in self.micros[k].shares:
                    pieces[k][name] = torch.tensor(prod(shares[axis] for axis in axes), dtype=dtype, device="cpu")
        self.asked.clear()
        return pieces

    def drawn(self, group: Sequence[int]) -> dict[str, Tensor]:
        """The random numbers of an update's samples that a piece needs. All are drawn, so that generators go the same
        way everywhere."""
        draws = self.micros[group[0]].drawn
        if draws:
            agree(self.where)
        here = owned(self.where)
        on = device(self.where, here[0]) if here else torch.device(self.where.type)
        used = {known.name for k in group for known in self.micros[k].known}
        values = ((each.name, evaluated(each.graph, {}, on)) for each in draws)
        return {name: value for name, value in values if name in used}

    def more(self, graph: Logical) -> dict[str, Tensor]:
        """The buffers and constants that a graph has use for, whole."""
        used = {*refs_in(graph.result), *(n for op in graph.ops for n in op.inputs)}
        sources = [s for n, s in enumerate(graph.sources) if n in used and s.kind in ("buffer", "constant")]
        for source in sources:
            if source.name not in self.asked:
                self.asked[source.name] = self.held(source)
        return {source.name: self.asked[source.name] for source in sources}

    def nothing(self) -> list[dict[str, Tensor]]:
        """The arguments of pieces on a rank that has no stage."""
        for group, *_ in self.updates:
            self.drawn(group)
        new = ([*(of.name for of in micro.known), *(of.name for of in micro.shares)] for micro in self.micros)
        return [dict.fromkeys(names, torch.empty(0, device="cpu")) for names in new]

    def known(self, known: Known, given: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """A value of all samples of an update."""
        key = known.name, batch.runs
        if key in self.constant:
            return self.constant[key]
        value = evaluated(known.graph, {**self.more(known.graph), **given})
        if known.hides and bool(_seen(value).triu(1).any()):
            raise SbpError(
                f"{self.name} cuts sequences into slices, and a mask {tuple(value.shape)} lets tokens see later ones\n"
                "  give it one that hides them, or leave slices= out"
            )
        if isinstance(known, MaskedPlaces):
            self.check_places(known, value, batch)
        if known.constant:
            self.constant[key] = value
        return value

    def check_places(self, known: MaskedPlaces, mask: Tensor, batch: Batch) -> None:
        """Refuse a mask by which what is of one micro-batch would go to another."""
        for k, piece in enumerate(batch.pieces):
            taken, has = known.taken(batch.piece(mask, known.dims, piece)), known.each * piece.sizes[0]
            if taken > has or (taken < has and k < len(batch.pieces) - 1):
                raise SbpError(
                    f"masked_scatter at {known.line or 'no line'} needs more than one micro-batch at once\n"
                    f"  in {self.name} the mask of micro-batch {k} takes {taken} elements, and its {piece.sizes[0]} "
                    f"samples have {has}\n"
                    "  give each sample as many places as it has of what is put there, such as tokens of its image, or "
                    "leave micro_batches= out"
                )


def _seen(mask: Tensor) -> Tensor:
    """A mask as booleans: True where it lets tokens through."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


class Pasts:
    """The places where slices leave what later ones need, in one step: a number for each sequence, op and rank."""

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
        return tuple([torch.tensor([number, start], device="cpu") for number in numbers]) or no_shards(layout)

    def __enter__(self) -> "Pasts":
        return self

    def __exit__(self, *_: object) -> None:
        forget(self.used)
