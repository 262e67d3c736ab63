"""Encoded moves: addends of a sum brought together in fewer bytes, many tensors in one exchange.

    src  ->  addends along some axes alone  ->  encoded, exchanged and decoded: whole there, or in pieces  ->  dst

What is exchanged are rows of bytes, one a rank, which move from S(0) to B as any tensor does: so their routes, prices,
bytes and records are those of all moves. Bytes of pieces are a row a rank for each that they go to, and move from S(0)
to S(1). Axes of which the tensor is not an addend have exchanges of their own.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...placement.world import owned
from ...sbp import Layout, State
from ..box import Pending, box, box_async
from ..boxing import Boxing, between
from ..encoding import Encoding, ShardsHere
from ..kept import KeptErrors, KeptTensors, unshared
from .course import (
    Dealt,
    GatheredPayloads,
    Payload,
    PlacedCourse,
    Request,
    Summed,
    SummedPieces,
    TensorEncoder,
)
from .encoded_sum import EncodedSum, rounds
from .packing import nbytes, packed, unpacked

__all__ = ["EncodedMove", "FlyingCode"]


class Asked(NamedTuple):
    """A move of plain tensors that an encoded one needs."""

    shards: ShardsHere
    src: Layout
    dst: Layout


Boxes: TypeAlias = Generator[Asked, ShardsHere, list[ShardsHere]]


class EncodedMove:
    """The moves of one bucket, encoded alike: by `now`, or begun by `start` and ended by `wait`."""

    def __init__(
        self, pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence[Encoding], encoder: TensorEncoder
    ) -> None:
        self.encodings = encodings
        self.sums = [EncodedSum(*pair, encoder, e.axes) for pair, e in zip(pairs, encodings, strict=True)]
        self.place, self.axes, self.ranks = self.sums[0].place, self.sums[0].axes, self.sums[0].ranks
        self.others = tuple(a for a, n in enumerate(self.place.shape) if n > 1 and a not in self.axes)

    def now(self, kept: KeptErrors, *members: ShardsHere) -> list[ShardsHere]:
        return _done(self.boxes(kept, members))

    def start(self, kept: KeptErrors, *members: ShardsHere) -> "FlyingCode":
        return FlyingCode(self.boxes(kept, members))

    def boxes(self, kept: KeptErrors, members: Sequence[ShardsHere]) -> Boxes:
        """The plain moves of it, one after the other; each is asked for, and its result sent."""
        addends = []
        for shards, one in zip(members, self.sums, strict=True):
            addends.append(shards if one.src is one.mid else (yield Asked(shards, one.src, one.mid)))
        courses = [
            [one.course(x, was, rank) for x, was, rank in zip(shards, _held(kept, one, e), self.here, strict=True)]
            for e, one, shards in zip(self.encodings, self.sums, addends, strict=True)
        ]
        made = yield from self.exchanged(courses)
        summed = []
        for e, one, rows in zip(self.encodings, self.sums, made, strict=True):
            summed.append(tuple(value for value, _ in rows))
            if e.name:
                kept.put(e.name, one.mid, str(e.encoder), [left for _, left in rows])
        out = []
        for shards, one in zip(summed, self.sums, strict=True):
            there = one.come.state == one.dst.state
            out.append(shards if there else (yield Asked(shards, one.come, one.dst)))
        return out

    @property
    def here(self) -> tuple[int, ...]:
        return owned(self.place)

    def exchanged(
        self, courses: Sequence[Sequence[PlacedCourse]]
    ) -> Generator[Asked, ShardsHere, list[list[tuple[Tensor, KeptTensors]]]]:
        """The courses of all members on the ranks owned here, in step, to their ends."""
        ends: list[list[tuple[Tensor, KeptTensors]]] = [[] for _ in courses]
        asked = {at: _all(rows, [None] * len(rows), ends[at]) for at, rows in enumerate(courses)}
        asked = {at: each for at, each in asked.items() if each}
        while asked:
            answers: dict[int, list[Any]] = {}
            for members in _alike(asked):
                rows = list(zip(*(asked[at] for at in members), strict=True))  # of each rank
                exchange = EXCHANGES[type(rows[0][0])](self, rows)
                for at, answer in zip(members, zip(*(yield from exchange), strict=True), strict=True):
                    answers[at] = list(answer)
            asked = {at: _all(courses[at], answers[at], ends[at]) for at in asked}
            asked = {at: each for at, each in asked.items() if each}
        return ends

    def summed(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[Tensor]]]:
        lines = tuple(torch.cat([one.value.reshape(-1) for one in row]) for row in rows)
        src, dst = self.line(lines[0].numel(), lines[0].dtype)
        come = yield Asked(lines, src, dst)
        return [
            [
                x.view(one.value.shape)
                for x, one in zip(torch.split(line, [o.value.numel() for o in row]), row, strict=True)
            ]
            for line, row in zip(come, rows, strict=True)
        ]

    def gathered(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[list[Payload]]]]:
        likes = [self._of_each_rank(row) for row in rows]
        size = max(map(nbytes, likes[0]))
        runs = (packed([one.payload for one in row]) for row in rows)
        lines = tuple(torch.nn.functional.pad(run, (0, size - run.numel()))[None] for run in runs)
        come = yield Asked(lines, *self.rows(size))
        return [_by_member(list(line), like) for line, like in zip(come, likes, strict=True)]

    def _of_each_rank(self, row: Sequence[GatheredPayloads]) -> list[tuple[Payload, ...]]:
        """For each rank payloads of all members as it has them, whose values say nothing."""
        return list(zip(*(one.like or (one.payload,) * self.ranks for one in row), strict=True))

    def summed_pieces(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[Tensor]]]:
        runs = [_each([[x.reshape(-1) for x in one.pieces] for one in row]) for row in rows]
        lines = tuple(_stacked(row) for row in runs)
        come = yield Asked(lines, *self.scattered(lines[0].shape[1], lines[0].dtype))
        found = []
        for line, row, rank in zip(come, rows, self.here, strict=True):
            mine = [one.pieces[self.sums[0].place_of(rank)] for one in row]
            parts = torch.split(line[0, : sum(x.numel() for x in mine)], [x.numel() for x in mine])
            found.append([part.view(x.shape) for part, x in zip(parts, mine, strict=True)])
        return found

    def dealt(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[list[Payload]]]]:
        runs = [[packed(each) for each in zip(*(one.payloads for one in row), strict=True)] for row in rows]
        lines = tuple(_stacked(row)[None] for row in runs)
        come = yield Asked(lines, *self.swapped(lines[0].shape[2]))
        found = []
        for line, row, rank in zip(come, rows, self.here, strict=True):
            at = self.sums[0].place_of(rank)
            found.append(_by_member(list(line[:, 0]), [[one.payloads[at] for one in row]] * self.ranks))
        return found

    @property
    def apart(self) -> int:
        """Groups of ranks that have exchanges of their own."""
        return prod(self.place.shape[a] for a in self.others)

    def line(self, numel: int, dtype: torch.dtype) -> tuple[Layout, Layout]:
        src = Layout(self.place, State((self.others,), self.axes), (numel * self.apart,), dtype)
        return src, src.with_state(State((self.others,)))

    def rows(self, size: int) -> tuple[Layout, Layout]:
        src = Layout(self.place, State((self.axes, self.others)), (self.ranks, size * self.apart), torch.uint8)
        return src, src.with_state(State(((), self.others)))

    def scattered(self, size: int, dtype: torch.dtype) -> tuple[Layout, Layout]:
        shape = self.ranks, size * self.apart
        src = Layout(self.place, State(((), self.others), self.axes), shape, dtype)
        return src, src.with_state(State((self.axes, self.others)))

    def swapped(self, size: int) -> tuple[Layout, Layout]:
        shape = self.ranks, self.ranks, size * self.apart
        src = Layout(self.place, State((self.axes, (), self.others)), shape, torch.uint8)
        return src, src.with_state(State(((), self.axes, self.others)))

    @cached_property
    def boxings(self) -> tuple[Boxing, ...]:
        """The boxings of what is sent, in the long run."""
        ways = [between(*pair) for pair in self.ends]
        return tuple(way for way in ways if way.sends) or tuple(ways[:1])

    @cached_property
    def ends(self) -> tuple[tuple[Layout, Layout], ...]:
        """The layouts of all its plain moves in the long run; nothing is encoded for it."""
        found = [(one.src, one.mid) for one in self.sums if one.src is not one.mid]
        each = [rounds(one.src, one.dst, one.encoder, one.axes) for one in self.sums]
        for number in range(max(map(len, each), default=0)):
            together: dict[tuple[type[Request], torch.dtype], list[tuple[int, ...]]] = {}
            for kind, dtype, sizes in (of[number] for of in each if number < len(of)):
                together.setdefault((kind, dtype), []).append(sizes)
            for (kind, dtype), members in together.items():
                found.append(self.ends_of(kind, dtype, max(map(sum, zip(*members, strict=True)))))
        return (*found, *((one.come, one.dst) for one in self.sums if one.come.state != one.dst.state))

    def ends_of(self, kind: type[Request], dtype: torch.dtype, size: int) -> tuple[Layout, Layout]:
        """The layouts of an exchange of so many elements or bytes, for each rank where there are several."""
        if kind is Summed:
            return self.line(size, dtype)
        if kind is SummedPieces:
            return self.scattered(size, dtype)
        return self.rows(size) if kind is GatheredPayloads else self.swapped(size)


EXCHANGES: Mapping[type[Request], Callable[[EncodedMove, Sequence[Any]], Generator[Asked, ShardsHere, Any]]] = {
    Summed: EncodedMove.summed,
    SummedPieces: EncodedMove.summed_pieces,
    GatheredPayloads: EncodedMove.gathered,
    Dealt: EncodedMove.dealt,
}


def _held(kept: KeptErrors, one: EncodedSum, e: Encoding) -> Sequence[KeptTensors]:
    """All that is kept of a tensor, by ranks owned here. A sum in pieces has no shares encoded again."""
    here = owned(one.place)
    if not e.name:
        return [{} for _ in here]
    held = kept.of(e.name, one.mid, str(e.encoder))
    return [unshared(each, one.mid, rank) for each, rank in zip(held, here, strict=True)] if one.cuts else held


class FlyingCode:
    """An encoded move under way: its first exchange is on the wire, the others follow when it is waited for."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes
        self.pending: Pending | None = None
        self.made: list[ShardsHere] | None = None
        try:
            self.pending = box_async(*next(boxes))
        except StopIteration as end:
            self.made = end.value

    def wait(self) -> list[ShardsHere]:
        if self.made is None:
            assert self.pending is not None
            self.made = _done(self.boxes, self.pending.wait())
        return self.made


def _done(boxes: Boxes, come: ShardsHere | None = None) -> list[ShardsHere]:
    try:
        asked = next(boxes) if come is None else boxes.send(come)
        while True:
            asked = boxes.send(box(*asked, op="encoded"))
    except StopIteration as end:
        made: list[ShardsHere] = end.value
        return made


def _all(rows: Sequence[PlacedCourse], answers: Sequence[Any], ends: list[tuple[Tensor, KeptTensors]]) -> list[Request]:
    """Let the courses of one tensor go on, one a rank, to all that they ask for next or to their ends."""
    asked = []
    for course, answer in zip(rows, answers, strict=True):
        try:
            asked.append(next(course) if answer is None else course.send(answer))
        except StopIteration as end:
            ends.append(end.value)
    assert not (asked and ends), "an encoder asks for other exchanges on one rank than on another"
    return asked


def _alike(asked: Mapping[int, Sequence[Request]]) -> list[list[int]]:
    """The members that share an exchange: sums of one dtype, or payloads."""
    found: dict[object, list[int]] = {}
    for at, (first, *_) in asked.items():
        added = (
            first.value if isinstance(first, Summed) else first.pieces[0] if isinstance(first, SummedPieces) else None
        )
        key = type(first), None if added is None else added.dtype
        found.setdefault(key, []).append(at)
    return list(found.values())


def _each(members: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Runs of all members, one for each rank that they are for."""
    return [torch.cat(one) for one in zip(*members, strict=True)]


def _stacked(runs: Sequence[Tensor]) -> Tensor:
    """A row for each rank; the shorter ones have zeros behind."""
    most = max(run.numel() for run in runs)
    return torch.stack([torch.nn.functional.pad(run, (0, most - run.numel())) for run in runs])


def _by_member(runs: Sequence[Tensor], likes: Sequence[Sequence[Payload]]) -> list[list[Payload]]:
    each = [unpacked(run, like) for run, like in zip(runs, likes, strict=True)]
    return [list(member) for member in zip(*each, strict=True)]
