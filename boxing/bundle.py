"""Bundles: the messages of many tensors in few exchanges, straight from the shards into those to be filled.

Pure: no tensors.

    tensor 1   |  0 -> 4  |  1 -> 4  |  1 -> 5  |        one message from each rank to each other a bundle, in which
    tensor 2   |  0 -> 5  |  1 -> 4  |                   the pieces lie behind each other
    tensor 3   |  0 -> 4, the first half |               a large tensor goes in several bundles, a share in each

In a bundle no rank sends and receives more than a limit together (or a row for each peer, where that is more); that is
all the memory that it takes. Several tensors take the bytes of each: a rank gets the elements that it needs and does
not hold.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import NamedTuple
from zlib import crc32

import torch

from ..placement import Placement, default_cluster
from ..placement.errors import SbpError
from ..placement.links import Price
from ..sbp import Layout
from .boxing import Boxing, between
from .routes.moves import Move
from .routes.program import PieceCut, RankProgram

__all__ = ["TensorBundle", "TensorPiece", "TensorShare", "bundled", "refilling"]


class TensorPiece(NamedTuple):
    """A box of a tensor that goes to a peer or comes from one: which tensor, and the box in its shards."""

    number: int
    box: PieceCut

    @property
    def numel(self) -> int:
        return prod(n for _, _, n in self.box)


class TensorShare(NamedTuple):
    """A part of a tensor: the `at`-th of `of` parts of each of its boxes."""

    number: int
    at: int = 0
    of: int = 1

    def cut(self, boxes: Sequence[PieceCut]) -> Iterator[TensorPiece]:
        """Its parts of boxes, cut along their longest dims; the sender and the receiver of a box cut it alike."""
        for box in boxes:
            if self.of == 1:
                yield TensorPiece(self.number, box)
                continue
            lengths = [n for _, _, n in box] or [1]
            d = lengths.index(max(lengths))
            lo, hi = (lengths[d] * i // self.of for i in (self.at, self.at + 1))
            if lo < hi:
                yield TensorPiece(self.number, (*box[:d], (box[d][0] + lo, box[d][1] + lo, hi - lo), *box[d + 1 :]))


def refilling(src: Layout, dst: Layout) -> Boxing:
    """The boxing by which shards that are there are filled from others: to the byte what ranks need and do not hold.

    It is one exchange or, where ranks that are to hold the same rather fetch a piece each and gather, two, of which the
    second is between places in the shards to be filled.
    """
    known = src.memo.get(("refilling", dst))
    cluster = default_cluster(dst.placement)
    if isinstance(known, Boxing) and known.cluster is cluster:
        return known
    if src.state.partial or dst.state.partial:
        raise SbpError(
            f"shards are filled from shards, and addends are none\n  from {src}\n  to   {dst}\n"
            "  add them up first: x.to_global(sbp=B)"
        )
    made = Boxing(src, dst, (Move("transfer", src, dst, (), Price(0.0, 0.0)),), cluster)
    if src.placement is not dst.placement and not {*src.placement.flat} & {*dst.placement.flat}:
        other = between(src, dst)
        first, *rest = (move.kind for move in other.moves)
        gathers = first == "transfer" and rest and all(kind == "all_gather" for kind in rest)
        if gathers and len(rest) == 1 and _shifts(other.moves[0].dst, dst) and other.total <= made.total:
            made = other
    src.memo["refilling", dst] = made
    return made


def _shifts(mid: Layout, dst: Layout) -> dict[int, tuple[int, ...]] | None:
    """The place of each rank's fetched piece in the shard that it fills; None if one lies there in several boxes."""
    found = {}
    for rank in dst.placement.flat:
        pairs = list(zip(mid.spans(rank), dst.spans(rank), strict=True))
        if any(len(inner) > 1 or len(outer) > 1 for inner, outer in pairs):
            return None
        found[rank] = tuple(inner[0][0] - outer[0][0] if inner else 0 for inner, outer in pairs)
    return found


def _shifted(boxes: Sequence[PieceCut], by: tuple[int, ...], *, read: bool) -> tuple[PieceCut, ...]:
    """Boxes that are read, or else written, so much further on."""
    return tuple(
        tuple((a + n * read, b + n * (not read), size) for (a, b, size), n in zip(box, by, strict=True))
        for box in boxes
    )


@lru_cache(1 << 16)
def stage_programs(way: Boxing, rank: int) -> tuple[RankProgram | None, ...]:
    """A rank's exchanges of one tensor. All write into shards to be filled; the first reads boxes of the source, the
    second boxes of these shards."""
    programs = [each[0] if each else None for each in way.programs(rank)]
    if len(programs) > 1:
        shifts = _shifts(way.moves[0].dst, way.dst)
        assert shifts is not None
        if rank in shifts:
            first, second = programs
            assert first is not None
            assert second is not None
            receives = tuple(p._replace(boxes=_shifted(p.boxes, shifts[rank], read=False)) for p in first.receives)
            sends = tuple(p._replace(boxes=_shifted(p.boxes, shifts[rank], read=True)) for p in second.sends)
            programs = [
                RankProgram(first.shape, _shifted(first.keep, shifts[rank], read=False), first.sends, receives),
                RankProgram(second.shape, (), sends, second.receives),
            ]
    return tuple(programs)


@dataclass(frozen=True, eq=False)
class TensorBundle:
    """Shares of tensors that go together, of one dtype, between two placements."""

    boxings: Sequence[Boxing]  # the boxings of all tensors, by their numbers
    shares: tuple[TensorShare, ...]

    @cached_property
    def first(self) -> Boxing:
        return self.boxings[self.shares[0].number]

    @property
    def dtype(self) -> torch.dtype:
        return self.first.src.dtype

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each exchange."""
        src, dst = self.first.src.placement.flat, self.first.dst.placement.flat
        return (tuple(sorted({*src, *dst})), tuple(sorted(dst)))[: len(self.first.moves)]

    @cached_property
    def fingerprint(self) -> int:
        """A number that two ranks share only if they send the same, for tags and for the ledger."""
        named = [(self.boxings[one.number].fingerprint, one.at, one.of) for one in self.shares]
        return crc32(repr(named).encode())

    @cached_property
    def text(self) -> bytes:
        """The bundle as the ledger and errors call it."""
        more = f" and {len(self.shares) - 1} more together" if len(self.shares) > 1 else ""
        return self.first.text + more.encode()

    @cached_property
    def sends(self) -> bool:
        """Whether anything goes from rank to rank."""
        return any(self.boxings[share.number].total for share in self.shares)

    def kept(self, rank: int) -> Iterator[TensorPiece]:
        """The pieces that a rank has of its own for what it is to fill."""
        for share in self.shares:
            program = stage_programs(self.boxings[share.number], rank)[0]
            if program is not None:
                yield from share.cut(program.keep)

    def messages(self, rank: int, stage: int, *, out: bool) -> dict[int, list[TensorPiece]]:
        """The pieces that a rank sends to each peer in an exchange, or receives from it, in order."""
        found: dict[int, list[TensorPiece]] = {}
        for share in self.shares:
            program = stage_programs(self.boxings[share.number], rank)[stage]
            for peer, boxes, _ in () if program is None else program.sends if out else program.receives:
                found.setdefault(peer, []).extend(share.cut(boxes))
        return {peer: found[peer] for peer in sorted(found) if found[peer]}


def bundled(boxings: Sequence[Boxing], limit: int) -> list[TensorBundle]:
    """The bundles of these tensors, in order, with at most `limit` bytes for what a rank sends and receives in one."""
    open_: dict[tuple[Placement, Placement, torch.dtype, int], tuple[list[TensorShare], Counter[int]]] = {}
    done: list[TensorBundle] = []
    for number, way in enumerate(boxings):
        key = way.src.placement, way.dst.placement, way.src.dtype, len(way.moves)
        for share, load in _shares(number, way, limit):
            shares, held = open_.get(key, ([], Counter[int]()))
            if shares and any(held[rank] + size > limit for rank, size in load.items()):
                done.append(TensorBundle(boxings, tuple(shares)))
                shares, held = [], Counter[int]()
            shares.append(share)
            held.update(load)
            open_[key] = shares, held
    return [*done, *(TensorBundle(boxings, tuple(shares)) for shares, _ in open_.values())]


def _shares(number: int, way: Boxing, limit: int) -> Iterator[tuple[TensorShare, Counter[int]]]:
    """The tensor in as few shares as are small enough, with the bytes that each makes a rank send and receive."""
    of = max(1, ceil(max(_load(way, TensorShare(number)).values(), default=0) / limit))
    longest = max(way.src.shape, default=1)
    while True:
        shares = [TensorShare(number, at, of) for at in range(of)]
        loads = [_load(way, share) for share in shares]
        if of >= longest or all(size <= limit for load in loads for size in load.values()):
            yield from zip(shares, loads, strict=True)
            return
        of += 1


def _load(way: Boxing, share: TensorShare) -> Counter[int]:
    found = Counter[int]()
    for rank in way.ranks:
        programs = [program for program in stage_programs(way, rank) if program is not None]
        sizes = [
            sum(piece.numel for part in (*one.sends, *one.receives) for piece in share.cut(part.boxes))
            for one in programs
        ]
        found[rank] = max(sizes, default=0) * way.src.dtype.itemsize
    return found
