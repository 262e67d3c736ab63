"""Encoded sums: the addends, the piece of the sum that each rank is to have, and the bytes in which it goes.

    whole     every rank has all of the sum: payloads of whole addends go to all
    pieces    each has its own: a payload for each piece, which goes to the rank of the piece, as in a reduce_scatter

All of it depends on layouts alone, so that plans, prices and buckets know it before anything runs.
"""

from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sbp import Layout, State
from ..boxing import between
from ..kept import KeptTensors
from .course import (
    Dealt,
    EncoderCourse,
    GatheredPayloads,
    PieceCuts,
    PlaceAmong,
    PlacedCourse,
    Request,
    Summed,
    SummedPieces,
    TensorEncoder,
)
from .packing import nbytes

__all__ = ["EncodedRound", "EncodedSum", "kept_bytes", "payload_bytes", "rounds"]


class EncodedSum:
    """A sum from `src` to `dst`: `mid` has addends along the encoded axes alone, `come` is how it comes of them."""

    def __init__(self, src: Layout, dst: Layout, encoder: TensorEncoder, axes: tuple[int, ...]) -> None:
        self.encoder, self.axes, self.place = encoder, axes, src.placement
        self.ranks = prod(self.place.shape[a] for a in axes)
        self.src, self.dst = src, dst.with_state(dst.state)
        self.mid = src.with_state(State(src.state.dims, tuple(a for a in src.state.partial if a in axes)))
        self.come = self.pieces if encoder.cuts else self.whole

    @cached_property
    def whole(self) -> Layout:
        return self.mid.with_state(State(self.mid.state.dims))

    @cached_property
    def pieces(self) -> Layout:
        """The sum cut along the axes as `dst` is, or the whole where the way on from there is cheaper."""
        was = self.mid.state.dims
        dims = tuple((*a, *(f for f in b if f in self.axes)) for a, b in zip(was, self.dst.state.dims, strict=True))
        holes = any(a != b and min(b) < 0 for a, b in zip(was, dims, strict=True))
        if dims == was or holes:  # a rank holds a dim with holes in several runs
            return self.whole
        cut = self.mid.with_state(State(dims))
        return cut if between(cut, self.dst).total <= between(self.whole, self.dst).total else self.whole

    @cached_property
    def cuts(self) -> tuple[tuple[slice, ...], ...]:
        """The piece of each rank along the axes within what is added up; none where every rank has it whole."""
        if self.come is self.whole:
            return ()
        same = [a == b for a, b in zip(self.come.state.dims, self.mid.state.dims, strict=True)]
        found: dict[int, tuple[slice, ...]] = {}
        for rank in self.place.flat:
            each = zip(self.come.slices(rank), self.mid.slices(rank), same, strict=True)
            piece = tuple(
                slice(None) if whole else slice(a.start - b.start, a.stop - b.start) if a.stop else slice(0, 0)
                for a, b, whole in each
            )
            known = found.setdefault(self.place_of(rank), piece)
            assert known == piece, "addends are as large on all ranks, and so are the pieces of them"
        return tuple(found[at] for at in range(self.ranks))

    def place_of(self, rank: int) -> int:
        """The place of a rank among those that add up with it."""
        at, coords = 0, self.place.coords(rank)
        for axis in self.axes:
            at = at * self.place.shape[axis] + coords[axis]
        return at

    def course(self, value: Tensor, kept: KeptTensors, rank: int, encoder: TensorEncoder | None = None) -> PlacedCourse:
        by, here = encoder or self.encoder, self.place_of(rank)
        if self.cuts:
            return _placed(by.course_in_pieces(value, kept, PieceCuts(self.cuts, here)), here)
        return _placed(by.course(value, kept, self.ranks), here)

    def dry_run(self, encoder: TensorEncoder) -> tuple[tuple["EncodedRound", ...], KeptTensors]:
        """The exchanges that it asks for at first by an encoder, and what is kept of it, without values."""
        found: list[EncodedRound] = []
        first = self.place.flat[0]
        empty = torch.empty(self.mid.local_shape(first), dtype=self.mid.dtype, device="meta")
        course, answer = self.course(empty, {}, first, encoder), None
        while True:
            try:
                asked = next(course) if answer is None else course.send(answer)
            except StopIteration as end:
                return tuple(found), end.value[1]
            one, answer = _round(asked, self.ranks)
            found.append(one)


def _placed(course: EncoderCourse, here: int) -> PlacedCourse:
    """A course on the rank that has this place among those that add up, so that only its exchanges are left."""
    answer = None
    while True:
        try:
            asked = course.send(answer)
        except StopIteration as end:
            made: tuple[Tensor, KeptTensors] = end.value
            return made
        answer = here if isinstance(asked, PlaceAmong) else (yield asked)


class EncodedRound(NamedTuple):
    """An exchange of one tensor.

    Its sizes are elements of a sum, elements or bytes for each rank that it deals to, or bytes of the payload of each
    rank that it gathers from."""

    kind: type[Request]
    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes of the rank that has most, to all others of them."""
        return (max if self.kind is GatheredPayloads else sum)(self.sizes) * self.dtype.itemsize


def _round(asked: Request, ranks: int) -> tuple[EncodedRound, Any]:
    """An exchange, and what comes of it on the first rank."""
    if isinstance(asked, Summed):
        return EncodedRound(Summed, asked.value.dtype, (asked.value.numel(),)), asked.value
    if isinstance(asked, SummedPieces):
        sizes = tuple(x.numel() for x in asked.pieces)
        return EncodedRound(SummedPieces, asked.pieces[0].dtype, sizes), asked.pieces[0]
    if isinstance(asked, GatheredPayloads):
        each = asked.like or [asked.payload] * ranks
        return EncodedRound(GatheredPayloads, torch.uint8, tuple(nbytes([x]) for x in each)), list(each)
    sizes = tuple(nbytes([payload]) for payload in asked.payloads)
    return EncodedRound(Dealt, torch.uint8, sizes), [asked.payloads[0]] * ranks


@lru_cache(4096)
def rounds(src: Layout, dst: Layout, encoder: TensorEncoder, axes: tuple[int, ...]) -> tuple[EncodedRound, ...]:
    """The exchanges of a sum in the long run."""
    return EncodedSum(src, dst, encoder, axes).dry_run(encoder.steady)[0]


def payload_bytes(src: Layout, dst: Layout, encoder: TensorEncoder, axes: tuple[int, ...]) -> int:
    """The bytes of a tensor as it is encoded, by which buckets are filled."""
    return sum(one.bytes for one in rounds(src, dst, encoder, axes))


def kept_bytes(src: Layout, dst: Layout, encoder: TensorEncoder, axes: tuple[int, ...]) -> int:
    """The bytes that are kept of a tensor on each of its ranks from one step to the next."""
    made = EncodedSum(src, dst, encoder, axes)
    runs = (made.dry_run(each)[1] for each in (encoder, encoder.steady))
    kept = {name: x.nbytes for left in runs for name, x in left.items() if name != "steps"}
    return sum(kept.values())
