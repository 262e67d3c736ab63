"""Programs of ranks: boxes that each sends, receives and keeps in one step, worked out from who holds what.

A `Box` names a rectangle twice, by its offsets in the buffer it is read from and in the one it is written to. All that
moves, from an all_gather to a transfer between placements, is a list of such boxes for each peer. Pure: no tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

from ...sbp import Layout
from ...sbp.state import Spans, nth_part, overlap

__all__ = [
    "PieceCut",
    "PeerBoxes",
    "RankProgram",
    "collective",
    "flat_gather",
    "flat_reduce",
    "local",
    "sources_of",
    "transfer",
]

PieceCut: TypeAlias = tuple[tuple[int, int, int], ...]  # for each dim: offset read, offset written, length


class PeerBoxes(NamedTuple):
    """The boxes exchanged with one peer, in an order that both know."""

    peer: int
    boxes: tuple[PieceCut, ...]
    numel: int


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One rank's share of a step. `terms` lists, in one order for all, whose addends make the result (else empty)."""

    shape: tuple[int, ...]  # of the result on this rank
    keep: tuple[PieceCut, ...]
    sends: tuple[PeerBoxes, ...] = ()
    receives: tuple[PeerBoxes, ...] = ()
    terms: tuple[int, ...] = ()
    group: tuple[int, ...] = ()  # every rank of this exchange, in one order for all
    flat: bool = False  # boxes count elements of the flattened buffer
    adds: bool = False  # boxes overlap where they are written, and are added up there
    _stacked: bool | None = None

    @cached_property
    def view(self) -> bool:
        """Whether the result is a part of what the rank has already."""
        return not self.sends and not self.receives and len(self.keep) == 1 and _numel(self.keep) == prod(self.shape)

    @cached_property
    def even(self) -> int:
        """Elements of each message where everybody sends everybody the same number, else 0."""
        sizes = {part.numel for part in (*self.sends, *self.receives)}
        everybody = len(self.sends) == len(self.receives) == len(self.group) - 1
        return sizes.pop() if everybody and len(sizes) == 1 and _numel(self.keep) in sizes else 0

    @cached_property
    def gathers(self) -> bool:
        """Whether every rank sends all it has to every other: an all_gather of even pieces."""
        whole = all(_read(part.boxes) == _read(self.keep) for part in self.sends)
        return bool(self.even) and not self.terms and not self.adds and whole

    def stacked(self, rank: int) -> bool:
        """Whether the pieces of an even all_gather, in the order of their ranks, are the result as it lies."""
        if self._stacked is None:
            pieces = sorted([(p.peer, p.boxes) for p in self.receives] + [(rank, self.keep)])
            starts = [_start(boxes, self.shape) for _, boxes in pieces]
            object.__setattr__(self, "_stacked", starts == [i * self.even for i in range(len(pieces))])
        return bool(self._stacked)


def local(src: Layout, dst: Layout, rank: int) -> RankProgram:
    """A step in which nothing is sent: the rank keeps what it has; the rest of the result is to be filled."""
    first = all(
        src.placement.coords(rank)[a] == 0 or a in src.state.split
        for a in dst.state.partial
        if a not in src.state.partial
    )
    own = first or dst.state.reduction != "sum"
    return RankProgram(dst.local_shape(rank), _boxes(src.spans(rank), dst.spans(rank)) if own else ())


def collective(src: Layout, dst: Layout, axes: tuple[int, ...], rank: int) -> RankProgram:
    """One exchange among the ranks along `axes` of a placement; axes that stop being partial are summed over."""
    group = src.placement.group(axes, rank)
    have, need = src.spans(rank), dst.spans(rank)
    reduces = any(a in src.state.partial for a in axes)
    return RankProgram(
        dst.local_shape(rank),
        _boxes(have, need),
        _parts((q, _boxes(have, dst.spans(q))) for q in group if q != rank),
        _parts((q, _boxes(src.spans(q), need)) for q in group if q != rank),
        group if reduces else (),
        group,
        adds=src.state.adds,
    )


def transfer(src: Layout, dst: Layout, rank: int) -> RankProgram:
    """One exchange from a placement to another; the source is not partial, its replicas share the sending evenly."""
    group = tuple(sorted({*src.placement.flat, *dst.placement.flat}))
    sends = []
    if rank in src.placement:
        for i, q in enumerate(dst.placement.flat):
            if q != rank and rank in sources_of(src, q, i):
                sends.append((q, _boxes(src.spans(rank), dst.spans(q))))
    if rank not in dst.placement:
        return RankProgram((), (), _parts(sends), group=group)
    need = dst.spans(rank)
    sources = sources_of(src, rank, dst.placement.flat.index(rank))
    keep = _boxes(src.spans(rank), need) if rank in sources else ()
    receives = _parts((s, _boxes(src.spans(s), need)) for s in sources if s != rank)
    return RankProgram(dst.local_shape(rank), keep, _parts(sends), receives, group=group)


def sources_of(src: Layout, needer: int, index: int) -> tuple[int, ...]:
    """One holder of each piece for this needer: its own replica if it has one, else the replicas in turn."""
    split = src.state.split
    replicas = tuple(a for a in range(src.placement.ndim) if a not in split)
    here = needer if needer in src.placement else src.placement.group(replicas, src.placement.flat[0])[
        index % prod(src.placement.shape[a] for a in replicas)
    ]  # fmt: skip
    return src.placement.group(tuple(sorted(split)), here)


def flat_reduce(numel: int, group: tuple[int, ...], rank: int, *, whole: bool) -> RankProgram:
    """Sum buffers of `numel` elements: each rank gets its piece of the sum or, with `whole`, all of it."""
    pieces = {q: ((0, numel),) if whole else _chunk(numel, group, q) for q in group}
    here: Spans = ((0, numel),)
    mine = _boxes((here,), (pieces[rank],))
    sends = _parts((q, _boxes((here,), (pieces[q],))) for q in group if q != rank)
    receives = _parts((q, mine) for q in group if q != rank)
    size = pieces[rank][0][1] - pieces[rank][0][0] if pieces[rank] else 0
    return RankProgram((size,), mine, sends, receives, group, group, flat=True)


def flat_gather(numel: int, group: tuple[int, ...], rank: int) -> RankProgram:
    """Put the pieces of `flat_reduce` together again on every rank."""
    whole: Spans = ((0, numel),)
    mine = _boxes((_chunk(numel, group, rank),), (whole,))
    sends = _parts((q, mine) for q in group if q != rank)
    receives = _parts((q, _boxes((_chunk(numel, group, q),), (whole,))) for q in group if q != rank)
    return RankProgram((numel,), mine, sends, receives, (), group, flat=True)


def _chunk(numel: int, group: tuple[int, ...], rank: int) -> Spans:
    lo, hi = nth_part(0, numel, group.index(rank), len(group))
    return ((lo, hi),) if lo < hi else ()


def _boxes(have: tuple[Spans, ...], need: tuple[Spans, ...]) -> tuple[PieceCut, ...]:
    return tuple(product(*(overlap(a, b) for a, b in zip(have, need, strict=True))))


def _start(boxes: tuple[PieceCut, ...], shape: tuple[int, ...]) -> int | None:
    """The offset in memory of the one box, if it is written in one run; None for anything else."""
    if len(boxes) != 1:
        return None
    start, stride, whole = 0, 1, True
    for (_, offset, length), size in reversed(list(zip(boxes[0], shape, strict=True))):
        if not whole and length != 1:
            return None
        start += offset * stride
        stride *= size
        whole = whole and length == size
    return start


def _read(boxes: tuple[PieceCut, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The elements that the boxes read, wherever they write them."""
    return tuple(tuple((offset, length) for offset, _, length in box) for box in boxes)


def _numel(boxes: Iterable[PieceCut]) -> int:
    return sum(prod(n for _, _, n in box) for box in boxes)


def _parts(pairs: Iterable[tuple[int, tuple[PieceCut, ...]]]) -> tuple[PeerBoxes, ...]:
    return tuple(PeerBoxes(peer, boxes, _numel(boxes)) for peer, boxes in pairs if boxes)
