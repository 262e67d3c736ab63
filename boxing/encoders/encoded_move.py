"""Encoded moves: addends of a sum brought together in fewer bytes, many tensors in one exchange.

    src  ->  addends along some axes alone  ->  encoded, exchanged and decoded: whole there  ->  dst

What is exchanged are rows of bytes, one a rank, which move from S(0) to B as any tensor does: so their routes, prices,
bytes and records are those of all moves. Axes of which the tensor is not an addend have exchanges of their own.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...placement.errors import SbpError
from ...sbp import Layout, State
from ..box import Pending, box, box_async
from ..plan import BoxingPlan, plan
from .encoder import Dealt, Encoder, EncoderCourse, GatheredPayloads, KeptTensors, Payload, Request, Summed
from .kept import KeptErrors
from .packing import nbytes, packed, unpacked

__all__ = ["EncodedMove", "Encoding", "FlyingCode", "check_encoding", "encoded_plans", "kept_bytes", "payload_bytes"]

ShardsHere: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Encoding:
    """How a move is encoded: the axes along which addends are, and the name under which errors are kept."""

    encoder: Encoder
    axes: tuple[int, ...]
    name: str = ""


class Asked(NamedTuple):
    """A move of plain tensors that an encoded one needs."""

    shards: ShardsHere
    src: Layout
    dst: Layout


Boxes: TypeAlias = Generator[Asked, ShardsHere, list[ShardsHere]]


def check_encoding(src: Layout, dst: Layout, encoder: Encoder, axes: Sequence[int], of: str) -> None:
    """Refuse what is no sum over these axes of one placement, or not of numbers that can be encoded."""
    names = src.placement.names or tuple(map(str, range(src.placement.ndim)))
    said = ", ".join(names[a] for a in axes)
    if src.placement is not dst.placement:
        raise SbpError(
            f"{of} goes from {src.placement} to {dst.placement}, and {encoder} encodes sums of one placement\n"
            "  sum it where it is, x.to_global(sbp=B, encoder=...); hops are encoded by flow.nn.compress(kind='hops')"
        )
    if src.state.partial and src.state.reduction != "sum":
        raise SbpError(
            f'{of} is P("{src.state.reduction}"), and {encoder} encodes addends of sums\n'
            "  a maximum of what was rounded is another maximum: leave the encoder out"
        )
    if not axes or not set(axes) <= set(src.state.partial) or set(axes) & set(dst.state.partial):
        raise SbpError(
            f"{of} is no sum over {said or 'any axis'}: it goes from {src.lie} to {dst.lie}\n"
            "  encode the move that adds it up, from P to B or S, or leave the encoder out"
        )
    encoder.check(src.dtype, of)
    if len({src.local_shape(rank) for rank in src.placement.flat}) > 1:
        raise SbpError(
            f"{of} {src.shape} is cut unevenly over other axes, and {encoder} needs as many bytes of every rank\n"
            "  cut it along a dim that the ranks divide, or leave the encoder out"
        )


class EncodedMove:
    """The moves of one bucket, encoded alike: by `now`, or begun by `start` and ended by `wait`."""

    def __init__(self, pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence[Encoding]) -> None:
        self.pairs, self.encodings = pairs, encodings
        self.place, self.axes = pairs[0][0].placement, encodings[0].axes
        self.mids = [_addends(src, self.axes) for src, _ in pairs]
        self.wholes = [mid.with_state(State(mid.state.dims)) for mid in self.mids]
        self.ranks = prod(self.place.shape[a] for a in self.axes)
        self.others = tuple(a for a, n in enumerate(self.place.shape) if n > 1 and a not in self.axes)

    def now(self, kept: KeptErrors, *members: ShardsHere) -> list[ShardsHere]:
        return _done(self.boxes(kept, members))

    def start(self, kept: KeptErrors, *members: ShardsHere) -> "FlyingCode":
        return FlyingCode(self.boxes(kept, members))

    def boxes(self, kept: KeptErrors, members: Sequence[ShardsHere]) -> Boxes:
        """The plain moves of it, one after the other; each is asked for, and its result sent."""
        addends = []
        for shards, (src, _), mid in zip(members, self.pairs, self.mids, strict=True):
            addends.append(shards if src is mid else (yield Asked(shards, src, mid)))
        before = [
            kept.of(e.name, mid, str(e.encoder)) if e.name else [{} for _ in shards]
            for e, mid, shards in zip(self.encodings, self.mids, addends, strict=True)
        ]
        courses = [
            [e.encoder.course(x, was, self.ranks) for x, was in zip(shards, held, strict=True)]
            for e, shards, held in zip(self.encodings, addends, before, strict=True)
        ]
        made = yield from self.exchanged(courses)
        whole = []
        for e, mid, rows in zip(self.encodings, self.mids, made, strict=True):
            whole.append(tuple(value for value, _ in rows))
            if e.name:
                kept.put(e.name, mid, str(e.encoder), [left for _, left in rows])
        out = []
        for shards, at, (_, dst) in zip(whole, self.wholes, self.pairs, strict=True):
            there = dst.with_state(dst.state)
            out.append(shards if at.state == there.state else (yield Asked(shards, at, there)))
        return out

    def exchanged(
        self, courses: Sequence[Sequence[EncoderCourse]]
    ) -> Generator[Asked, ShardsHere, list[list[tuple[Tensor, KeptTensors]]]]:
        """The courses of all members on the ranks owned here, in step, to their ends."""
        ends: list[list[tuple[Tensor, KeptTensors]]] = [[] for _ in courses]
        asked = {at: _all(rows, [None] * len(rows), ends[at]) for at, rows in enumerate(courses)}
        asked = {at: each for at, each in asked.items() if each}
        while asked:
            answers: dict[int, list[Any]] = {}
            for members in _alike(asked):
                rows = list(zip(*(asked[at] for at in members), strict=True))  # of each rank
                kind = type(rows[0][0])
                exchange = self.sums if kind is Summed else self.gathers if kind is GatheredPayloads else self.deals
                for at, answer in zip(members, zip(*(yield from exchange(rows)), strict=True), strict=True):
                    answers[at] = list(answer)
            asked = {at: _all(courses[at], answers[at], ends[at]) for at in asked}
            asked = {at: each for at, each in asked.items() if each}
        return ends

    def sums(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[Tensor]]]:
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

    def gathers(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[list[Payload]]]]:
        lines = tuple(packed([one.payload for one in row])[None] for row in rows)
        come = yield Asked(lines, *self.rows(lines[0].shape[1]))
        return [_by_member(list(line), [one.payload for one in row]) for line, row in zip(come, rows, strict=True)]

    def deals(self, rows: Sequence[Any]) -> Generator[Asked, ShardsHere, list[list[list[Payload]]]]:
        lines = tuple(
            torch.stack([packed([one.payloads[to] for one in row]) for to in range(self.ranks)])[None] for row in rows
        )
        come = yield Asked(lines, *self.dealt(lines[0].shape[2]))
        return [
            _by_member(list(line[:, 0]), [one.payloads[0] for one in row]) for line, row in zip(come, rows, strict=True)
        ]

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

    def dealt(self, size: int) -> tuple[Layout, Layout]:
        shape = self.ranks, self.ranks, size * self.apart
        src = Layout(self.place, State((self.axes, (), self.others)), shape, torch.uint8)
        return src, src.with_state(State(((), self.axes, self.others)))

    @cached_property
    def plans(self) -> tuple[BoxingPlan, ...]:
        """The plans of what is sent, in the long run; nothing is encoded for it."""
        found = [plan(src, mid) for (src, _), mid in zip(self.pairs, self.mids, strict=True) if src is not mid]
        asked: list[tuple[Layout, Layout]] = []
        shape = [mid.local_shape(self.place.flat[0]) for mid in self.mids]
        rounds = [
            _rounds(e.encoder.steady, s, m.dtype, self.ranks)
            for e, s, m in zip(self.encodings, shape, self.mids, strict=True)
        ]
        for number in range(max(map(len, rounds), default=0)):
            sizes: dict[tuple[type[Request], torch.dtype], int] = {}
            for each in rounds:
                if number < len(each):
                    kind, dtype, size = each[number]
                    sizes[kind, dtype] = sizes.get((kind, dtype), 0) + size
            for (kind, dtype), size in sizes.items():
                asked.append(
                    self.line(size, dtype)
                    if kind is Summed
                    else self.rows(size)
                    if kind is GatheredPayloads
                    else self.dealt(size)
                )
        found += [plan(*pair) for pair in asked]
        ends = zip(self.wholes, self.pairs, strict=True)
        last = [plan(at, dst.with_state(dst.state)) for at, (_, dst) in ends if at.state != dst.state]
        return (*found, *(way for way in last if way.sends))


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


def _addends(src: Layout, axes: tuple[int, ...]) -> Layout:
    """The same as addends along these axes alone."""
    return src.with_state(State(src.state.dims, tuple(a for a in src.state.partial if a in axes)))


def _all(
    rows: Sequence[EncoderCourse], answers: Sequence[Any], ends: list[tuple[Tensor, KeptTensors]]
) -> list[Request]:
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
        key = (Summed, first.value.dtype) if isinstance(first, Summed) else type(first)
        found.setdefault(key, []).append(at)
    return list(found.values())


def _by_member(runs: Sequence[Tensor], like: Sequence[Payload]) -> list[list[Payload]]:
    each = [unpacked(run, like) for run in runs]
    return [list(member) for member in zip(*each, strict=True)]


@lru_cache(4096)
def _rounds(
    encoder: Encoder, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> tuple[tuple[type[Request], torch.dtype, int], ...]:
    """The exchanges of a tensor: their kinds, and elements of a sum or bytes of a payload."""
    return _dry_run(encoder, shape, dtype, ranks)[0]


def kept_bytes(src: Layout, encoding: Encoding, rank: int) -> int:
    """The bytes that are kept of a tensor on a rank from one step to the next."""
    place, encoder = src.placement, encoding.encoder
    if rank not in place:
        return 0
    ranks = prod(place.shape[a] for a in encoding.axes)
    runs = (_dry_run(each, src.local_shape(rank), src.dtype, ranks)[1] for each in (encoder, encoder.steady))
    kept = {name: x.nbytes for left in runs for name, x in left.items() if name != "steps"}
    return sum(kept.values())


def _dry_run(
    encoder: Encoder, shape: tuple[int, ...], dtype: torch.dtype, ranks: int
) -> tuple[tuple[tuple[type[Request], torch.dtype, int], ...], KeptTensors]:
    """The exchanges that a tensor asks for at first, and what is kept of it, without values."""
    found: list[tuple[type[Request], torch.dtype, int]] = []
    course = encoder.course(torch.empty(shape, dtype=dtype, device="meta"), {}, ranks)
    answer: Any = None
    while True:
        try:
            asked = next(course) if answer is None else course.send(answer)
        except StopIteration as end:
            return tuple(found), end.value[1]
        if isinstance(asked, Summed):
            found.append((Summed, asked.value.dtype, asked.value.numel()))
            answer = asked.value
        elif isinstance(asked, GatheredPayloads):
            found.append((GatheredPayloads, torch.uint8, nbytes([asked.payload])))
            answer = [asked.payload] * ranks
        else:
            found.append((Dealt, torch.uint8, nbytes(asked.payloads[:1])))
            answer = list(asked.payloads)


def payload_bytes(encoder: Encoder, shape: tuple[int, ...], dtype: torch.dtype, ranks: int) -> int:
    """The bytes of a tensor as it is encoded, by which buckets are filled."""
    sizes = _rounds(encoder.steady, shape, dtype, ranks)
    return sum(size * (kind_dtype.itemsize if kind is Summed else 1) for kind, kind_dtype, size in sizes)


def encoded_plans(pairs: Sequence[tuple[Layout, Layout]], encodings: Sequence[Encoding]) -> tuple[BoxingPlan, ...]:
    """The plans of what an encoded bucket sends."""
    return EncodedMove(pairs, encodings).plans
