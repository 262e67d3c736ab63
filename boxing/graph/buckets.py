"""Buckets: gradients of many parameters, or what an optimizer changed of them, brought together in one exchange.

    sum        the local gradients behind each other, as one line of addends that becomes whole
    scatter    each cut into what the ranks are to hold, as one row a rank, of which each gets its own
    gather     the changed pieces of a rank as one row, of which all ranks get all
    encoded    a sum in fewer bytes, that of all encoded by one encoder

A bucket is one move with a boxing of its own, because other routes are the quickest for what is large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.device import family
from ...sbp import Layout, State
from ..boxing import Boxing, between
from ..encoding import MoveEncoder, encoded_boxings
from .physical import Back, Physical

__all__ = ["Packed", "bucketed", "exchange", "exchanges", "gathered", "packed"]

# Properties that all members of a bucket share: kind, placement, axes, dtype.
BucketKind: TypeAlias = tuple[str | MoveEncoder, Placement, tuple[int, ...], torch.dtype]
Pair: TypeAlias = tuple[Layout, Layout]


def bucketed(
    graph: Physical, limit: int | None = None, *, together: Callable[[Back], int | None] = lambda move: 0
) -> Physical:
    """The graph with the moves of its parameters' gradients in buckets of up to `limit` bytes, in backward order.

    Without one, as many as suit the device. In a bucket are only moves for which `together` gives the same number; None
    is for one that goes alone.
    """
    parameters = {s.value.name for s in graph.sources if s.kind == "parameter"}
    filling = _Filling(limit)
    backs = []
    for move in graph.backs:
        kind, group = (_kind_of(move), together(move)) if move.into in parameters else (None, None)
        if kind is not None and group is not None:
            size = _size(move)
            move = replace(move, bucket=filling.number(kind, size, group))
        backs.append(move)
    return replace(graph, backs=tuple(backs))


def _kind_of(move: Back) -> BucketKind | None:
    """The kind of moves that share a bucket with this one; those that are encoded alike do."""
    if move.encoding is None:
        return _kind(move.src, move.dst)
    return move.encoding.encoder, move.src.placement, move.encoding.axes, move.src.dtype


def _size(move: Back) -> int:
    """The bytes of a gradient in its bucket."""
    if move.encoding is None:
        return prod(move.src.local_shape(move.src.placement.flat[0])) * move.src.dtype.itemsize
    return move.encoding.encoder.payload_bytes(move.src, move.dst, move.encoding.axes)


class _Filling:
    """Buckets that are being filled, one of each kind and group at a time, up to a limit of bytes each."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.open: dict[tuple[BucketKind, int], tuple[int, int]] = {}  # number and bytes so far
        self.count = 0

    def number(self, kind: BucketKind, size: int, group: int = 0) -> int:
        """The number of the bucket that takes one more of so many bytes."""
        most = self.limit or family(kind[1].type).bucket
        number, held = self.open.get((kind, group), (-1, most))
        if held + size > most:
            number, held, self.count = self.count, 0, self.count + 1
        self.open[kind, group] = number, held + size
        return number


@lru_cache(4096)
def _kind(src: Layout, dst: Layout) -> BucketKind | None:
    """The kind of moves that share a bucket with this one; None if it has to go alone."""
    axes = src.state.partial
    if not axes or dst.state.partial or src.state.reduction != "sum" or src.placement is not dst.placement:
        return None
    if not src.numel or len({src.local_shape(rank) for rank in src.placement.flat}) > 1:
        return None
    if src.state.dims == dst.state.dims:
        return "sum", src.placement, axes, src.dtype
    d = _dim(src, dst, axes)
    return None if d is None else ("scatter", src.placement, dst.state.dims[d][len(src.state.dims[d]) :], src.dtype)


def gathered(pairs: Sequence[Pair], limit: int | None = None) -> list[list[int]]:
    """Moves of changed pieces to where their parameters lie, by numbers: each list is of those in one exchange."""
    filling = _Filling(limit)
    found: dict[tuple[str, int], list[int]] = {}
    for at, (src, dst) in enumerate(pairs):
        kind = _gather_kind(src, dst)
        key = ("alone", at) if kind is None else ("bucket", filling.number(kind, dst.numel * dst.dtype.itemsize))
        found.setdefault(key, []).append(at)
    return list(found.values())


@lru_cache(4096)
def _gather_kind(src: Layout, dst: Layout) -> BucketKind | None:
    """The kind of moves of pieces that share a bucket with this one; None if it has to go alone."""
    if src.state.partial or dst.state.partial or src.placement is not dst.placement or not src.numel:
        return None
    if any(len({x.local_shape(rank) for rank in x.placement.flat}) > 1 for x in (src, dst)):
        return None
    before, after = ({a for cut in x.state.dims for a in cut if a >= 0} for x in (src, dst))
    axes = tuple(sorted(before - after))
    d = _dim(dst, src, axes) if axes and after < before else None
    return None if d is None else ("gather", src.placement, src.state.dims[d][len(dst.state.dims[d]) :], src.dtype)


def _dim(src: Layout, dst: Layout, axes: tuple[int, ...]) -> int | None:
    """The dim that ranks along these axes cut into equal shares, each in one piece; None if there is none."""
    ranks = prod(src.placement.shape[a] for a in axes)
    changed = [d for d, (a, b) in enumerate(zip(src.state.dims, dst.state.dims, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    (d,) = changed
    size = src.local_shape(src.placement.flat[0])[d]
    cut = dst.state.dims[d]
    joined = cut[: len(src.state.dims[d])] == src.state.dims[d] and set(cut[len(src.state.dims[d]) :]) == set(axes)
    return d if joined and size % ranks == 0 and all(a >= 0 for a in src.state.dims[d]) else None


@dataclass(frozen=True)
class Packed:
    """The one move of a bucket, and how its members get into and out of it on each rank.

    A gathered tensor comes out as a view in which the dim that was cut is two: the ranks, and what each had.
    """

    src: Layout
    dst: Layout
    pack: Callable[[Sequence[Tensor], Tensor | None], Tensor]  # into memory that is there already, if it is given
    unpack: Callable[[Tensor], list[Tensor]]


def packed(pairs: Sequence[Pair]) -> Packed:
    """The bucket of moves that `bucketed` or `gathered` found alike."""
    src, dst = pairs[0]
    if not src.state.partial:
        return _row_of_pieces(pairs)
    where, axes = src.placement, src.state.partial
    others = tuple(a for a, n in enumerate(where.shape) if n > 1 and a not in axes)
    sizes = [prod(a.local_shape(where.flat[0])) for a, _ in pairs]
    apart = prod(where.shape[a] for a in others)  # each of these groups has an exchange of its own
    shapes = [b.local_shape(where.flat[0]) for _, b in pairs]
    if src.state.dims == dst.state.dims:
        line = Layout(where, State((others,), axes), (sum(sizes) * apart,), src.dtype)
        return Packed(
            line,
            line.with_state(State((others,))),
            lambda parts, out: torch.cat([part.reshape(-1) for part in parts], out=out),
            lambda whole: [x.view(shape) for x, shape in zip(torch.split(whole, sizes), shapes, strict=True)],
        )
    dims = [next(d for d, cut in enumerate(b.state.dims) if cut != a.state.dims[d]) for a, b in pairs]
    order = dst.state.dims[dims[0]][len(src.state.dims[dims[0]]) :]
    ranks = prod(where.shape[a] for a in order)
    rows = Layout(where, State(((), others), axes), (ranks, sum(sizes) // ranks * apart), src.dtype)

    def pack(parts: Sequence[Tensor], out: Tensor | None) -> Tensor:
        cut = [_rows(part, d, ranks) for part, d in zip(parts, dims, strict=True)]
        return torch.cat(cut, 1, out=out)

    def unpack(row: Tensor) -> list[Tensor]:
        pieces = torch.split(row.view(-1), [size // ranks for size in sizes])
        return [x.view(shape) for x, shape in zip(pieces, shapes, strict=True)]

    return Packed(rows, rows.with_state(State((order, others))), pack, unpack)


def _row_of_pieces(pairs: Sequence[Pair]) -> Packed:
    """The bucket of moves that `gathered` found alike."""
    (src, dst), where = pairs[0], pairs[0][0].placement
    rank = where.flat[0]
    dims = [next(d for d, cut in enumerate(b.state.dims) if cut != a.state.dims[d]) for a, b in pairs]
    order = src.state.dims[dims[0]][len(dst.state.dims[dims[0]]) :]
    others = tuple(a for a, n in enumerate(where.shape) if n > 1 and a not in order)
    ranks, apart = prod(where.shape[a] for a in order), prod(where.shape[a] for a in others)
    shapes = [a.local_shape(rank) for a, _ in pairs]
    sizes = [prod(shape) for shape in shapes]
    rows = Layout(where, State((order, others)), (ranks, sum(sizes) * apart), src.dtype)

    def pack(parts: Sequence[Tensor], out: Tensor | None) -> Tensor:
        return torch.cat([part.reshape(1, -1) for part in parts], 1, out=out)

    def unpack(whole: Tensor) -> list[Tensor]:
        pieces = torch.split(whole.view(ranks, -1), sizes, 1)
        return [x.view(ranks, *shape).movedim(0, d) for x, shape, d in zip(pieces, shapes, dims, strict=True)]

    return Packed(rows, rows.with_state(State(((), others))), pack, unpack)


def exchanges(moves: Sequence[Back]) -> tuple[Boxing, ...]:
    """The boxings by which a bucket moves, or a single one: several, where an encoder has several exchanges."""
    encodings = [move.encoding for move in moves if move.encoding is not None]
    if encodings:
        return encoded_boxings([(move.src, move.dst) for move in moves], encodings)
    return (exchange(moves),)


def exchange(moves: Sequence[Back] | Sequence[Boxing]) -> Boxing:
    """The one boxing by which all of a bucket move, or a single move; of encoded ones, the boxing with most bytes."""
    first = moves[0]
    if isinstance(first, Back) and first.encoding is not None:
        return max(exchanges([move for move in moves if isinstance(move, Back)]), key=lambda way: way.bytes)
    if len(moves) > 1:
        together = packed([(move.src, move.dst) for move in moves])
        return between(together.src, together.dst)
    (move,) = moves
    return move if isinstance(move, Boxing) else move.boxing


def _rows(part: Tensor, dim: int, ranks: int) -> Tensor:
    """One row for each rank along a dim."""
    shape = part.shape
    cut = part.reshape(*shape[:dim], ranks, shape[dim] // ranks, *shape[dim + 1 :])
    return cut.movedim(dim, 0).reshape(ranks, -1)
