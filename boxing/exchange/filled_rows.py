"""A move that sends only rows that hold something, so that its bytes are known only as it runs.

    rank 0   a a . .  ->  rank 1      marks: 1 1 0 0, as many as the boxing says      rows: the two a, and no more

Marks go first, a byte a row, so that both ends know how many rows come, and where they belong. Then the rows go, as
many to each rank as there are. A row that is not sent is zero, so there are zeros in its place on the other rank. So
this is the move itself for all values, and only its bytes depend on them.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from math import prod
from time import perf_counter

import torch
from torch import Tensor

from ...placement.world import owned
from ...sbp import Layout
from ..boxing import Boxing, between
from ..exchange.buffer import part
from ..exchange.execute import Flight, exchanges, land, steps, transport, waited
from ..record import note
from ..routes.program import PeerBoxes, PieceCut, RankProgram
from .transport import Arrival, Errand

__all__ = ["RunBoxing", "box_filled", "filled_exchanges", "filled_steps"]

COPYING = ("all_gather", "all_to_all", "exchange")  # moves of values among ranks of one placement


class RunBoxing(Boxing):
    """A boxing as it ran: bytes are those that the ranks of this process sent and received, which no other knows."""

    def __init__(self, way: Boxing, sent: Mapping[int, int], received: Mapping[int, int]) -> None:
        super().__init__(way.src, way.dst, way.moves, way.cluster)
        self._sent, self._received = dict(sent), dict(received)
        self.__dict__["bytes"] = max(self._received.values(), default=0)
        self.__dict__["total"] = sum(self._sent.values())

    def sent(self, rank: int) -> int:
        return self._sent.get(rank, 0)

    def received(self, rank: int) -> int:
        return self._received.get(rank, 0)


def box_filled(shards: Sequence[Tensor], src: Layout, dst: Layout, *, op: str = "box") -> tuple[Tensor, ...]:
    """The shards of `dst` that this process owns, outside autograd; bytes that went are in the record."""
    return land(filled_steps(shards, src, dst, op=op))


def filled_exchanges(way: Boxing) -> int:
    """The number of exchanges that such a boxing waits for: of marks and of rows."""
    ways = (between(move.src, move.dst) for move in way.moves)
    return sum(2 if _marks(step) else exchanges(step) for step in ways)


def filled_steps(
    shards: Sequence[Tensor], src: Layout, dst: Layout, *, op: str = "box", background: bool = False
) -> Flight:
    """The same as a generator that pauses whenever an exchange is under way."""
    way = between(src, dst)
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    values = tuple(shards)
    for move in way.moves:
        step = between(move.src, move.dst)
        if _marks(step):
            values = yield from _exchanged(step, values, sent, received, background)
        else:
            values = yield from steps(step, values, background)
            for rank in owned(step.src.placement):
                sent[rank] += step.sent(rank)
                received[rank] += step.received(rank)
    note(op, RunBoxing(way, sent, received))
    return values


def _marks(step: Boxing) -> bool:
    """Whether one move is of rows that are marked."""
    return len(step.moves) == 1 and step.moves[0].kind in COPYING and _by_rows(step.src, step.dst)


def _by_rows(src: Layout, dst: Layout) -> bool:
    """Whether rows stay whole on their way."""
    return bool(src.numel) and len(src.shape) > 1 and src.state.dims[-1] == dst.state.dims[-1]


def _exchanged(
    way: Boxing, shards: Sequence[Tensor], sent: Counter[int], received: Counter[int], background: bool
) -> Flight:
    """Marks, and then the rows that they mark."""
    here = owned(way.src.placement)
    if not here:
        return (yield from steps(way, shards, background))
    programs = {rank: program for rank, (program,) in way.ours[0][1].items()}
    values = dict(zip(here, shards, strict=True))
    marks = {rank: (x != 0).any(-1, keepdim=True).to(torch.uint8) for rank, x in values.items()}
    wire = transport()
    jobs = [Errand(rank, _of_marks(program), marks[rank]) for rank, program in programs.items()]
    told = dict(zip(programs, (yield from _arrived(wire.start(way, 1, jobs, "sum", background))), strict=True))
    jobs = [_packed(rank, program, values[rank], marks[rank], told[rank]) for rank, program in programs.items()]
    arrived = dict(zip(programs, (yield from _arrived(wire.start(way, 2, jobs, "sum", background))), strict=True))
    for rank, program, packed in jobs:
        marking = programs[rank]
        sent[rank] += packed.nbytes + sum(_rows(one) for one in marking.sends)
        received[rank] += prod(program.shape) * packed.itemsize + sum(_rows(one) for one in marking.receives)
    return tuple(_placed(programs[rank], values[rank], told[rank], arrived[rank]) for rank in here)


def _arrived(exchange: Arrival) -> Generator[None, None, list[Tensor]]:
    """The result of an exchange, waited for when its turn comes again."""
    yield
    start = perf_counter()
    found = exchange.wait()
    waited.seconds += perf_counter() - start
    return found


def _of_marks(program: RankProgram) -> RankProgram:
    """The same exchange of one mark a row."""
    *lead, _ = program.shape
    sends, receives = (tuple(_marked(one) for one in way) for way in (program.sends, program.receives))
    return RankProgram((*lead, 1), _narrow(program.keep), sends, receives, group=program.group)


def _marked(one: PeerBoxes) -> PeerBoxes:
    return PeerBoxes(one.peer, _narrow(one.boxes), _rows(one))


def _narrow(boxes: tuple[PieceCut, ...]) -> tuple[PieceCut, ...]:
    return tuple((*box[:-1], (0, 0, 1)) for box in boxes)


def _rows(one: PeerBoxes) -> int:
    """The rows of a message, if all were sent."""
    return sum(prod(length for _, _, length in box[:-1]) for box in one.boxes)


def _packed(rank: int, program: RankProgram, value: Tensor, marks: Tensor, told: Tensor) -> Errand:
    """The rows that a rank sends, and how many it gets of whom."""
    rows = [_filled(value, marks, one.boxes) for one in program.sends]
    flat = torch.cat([row.reshape(-1) for row in rows]) if rows else value.new_empty(0)
    sends = [(one.peer, row.numel()) for one, row in zip(program.sends, rows, strict=True)]
    width = value.shape[-1]
    receives = [
        (one.peer, width * sum(int(part(told, box, 1).sum()) for box in _narrow(one.boxes))) for one in program.receives
    ]
    size = sum(numel for _, numel in receives)
    return Errand(rank, RankProgram((size,), (), _runs(sends, 0), _runs(receives, 1), group=program.group), flat)


def _filled(value: Tensor, marks: Tensor, boxes: tuple[PieceCut, ...]) -> Tensor:
    found = [
        part(value, box, 0)[part(marks, narrow, 0)[..., 0] != 0]
        for box, narrow in zip(boxes, _narrow(boxes), strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _runs(messages: Sequence[tuple[int, int]], side: int) -> tuple[PeerBoxes, ...]:
    """Messages one behind the other; empty ones are not sent."""
    found, at = [], 0
    for peer, numel in messages:
        if numel:
            found.append(PeerBoxes(peer, (((0, at, numel) if side else (at, 0, numel),),), numel))
        at += numel
    return tuple(found)


def _placed(program: RankProgram, value: Tensor, told: Tensor, arrived: Tensor) -> Tensor:
    """The result: rows that a rank keeps and that came, each in its place, and zero elsewhere."""
    out, at = value.new_zeros(program.shape), 0
    for box in program.keep:
        part(out, box, 1).copy_(part(value, box, 0))
    rows = arrived.view(-1, value.shape[-1])
    for one in program.receives:
        for box, narrow in zip(one.boxes, _narrow(one.boxes), strict=True):
            here = part(told, narrow, 1)[..., 0] != 0
            count = int(here.sum())
            part(out, box, 1)[here] = rows[at : at + count]
            at += count
    return out
