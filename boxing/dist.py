"""The transport between processes: torch.distributed, called directly (its functional collectives cost 80-100 us each).

On Gloo an exchange is sends and receives, all posted at once: Gloo's own collectives go round a ring and take up to five
times as long on busy cores. Each message is tagged with plan, step and turn, so that ranks that disagree never meet. On NCCL,
and on Gloo for many ranks, it is the backend's all-to-all, all_gather, reduce_scatter or all_reduce.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ..placement.ledger import Ledger
from ..placement.world import process_group, store, world
from ..sbp.signature import Reduction
from .buffer import finish, keep, pack, part, unpack
from .plan import Plan
from .program import Program
from .record import user_line
from .transport import Arrived, Job, Sent
from .watch import Turn, Watch

__all__ = ["Dist"]

MANY = 16  # from this many ranks on, Gloo's collectives send fewer messages than everybody to everybody
NATIVE_SUMS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Dist:
    """One rank of many. Every exchange is entered in the ledger first; a failed one breaks the group for good."""

    def __init__(self) -> None:
        here = world()
        assert here.rank is not None and here.size is not None
        self.rank, self.here = here.rank, here
        self.sent = Sent()
        self.pg = process_group(range(here.size))
        self.ledger = Ledger(here.rank, here.size, store())
        self.watch = Watch(self.ledger, self.pg, here)

    def start(self, plan: Plan, stage: int, jobs: list[Job], reduction: Reduction) -> "Wire | Arrived":
        if not jobs:
            return Arrived([])
        (rank, program, buffer) = jobs[0]
        if program.flat:
            buffer = buffer.reshape(-1)
        turn = self._enter(plan, stage, program.group)
        if self._native(buffer, program.group):
            return self._collective(turn, rank, program, buffer, reduction)
        return self._messages(turn, rank, program, buffer, reduction)

    def all_reduce(self, plan: Plan, stage: int, jobs: list[Job], reduction: Reduction) -> "Wire | None":
        if not jobs or not self._native(jobs[0].buffer, jobs[0].program.group):
            return None
        rank, program, buffer = jobs[0]
        if buffer.dtype not in NATIVE_SUMS:
            return None
        turn = self._enter(plan, stage, program.group)
        out = buffer.clone(memory_format=torch.contiguous_format)
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[reduction]
        work = self._post(turn, lambda: process_group(program.group).allreduce([out], options))
        own = program.shape[0]
        self.sent.add(rank, (out.numel() - own + own * (len(program.group) - 1)) * out.element_size())
        return Wire(self, turn, [work], lambda: out)

    def refuse(self, plan: Plan, error: Exception) -> None:
        """Take the turn of the first exchange with an entry that fits nobody's, so that waiting peers learn of it."""
        for programs in plan.programs(self.rank):
            for program in programs:
                if program.group:
                    text = f"refused: {error}".encode()
                    self.ledger.enter(_key(program.group), (), 0, text)
                    return

    def _native(self, buffer: Tensor, group: tuple[int, ...]) -> bool:
        if buffer.device.type == "cuda":
            return True
        return len(group) > MANY if self.here.native is None else self.here.native

    def _enter(self, plan: Plan, stage: int, group: tuple[int, ...]) -> Turn:
        self.watch.check()
        fingerprint = (plan.fingerprint + stage) or 1
        text = f"{plan.src} -> {plan.dst.lie} on {plan.dst.placement}\n{user_line()}"
        number, other = self.ledger.enter(_key(group), group, fingerprint, text.encode())
        turn = Turn(_key(group), number, fingerprint, group, text)
        if other is not None:
            raise self.watch.mismatch(turn, other)
        return turn

    def _post(self, turn: Turn, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self.watch.failure(turn, error) from error

    def _messages(
        self, turn: Turn, rank: int, program: Program, buffer: Tensor, reduction: Reduction
    ) -> "Wire | Arrived":
        """Everybody to everybody concerned, without a collective. Pieces that lie in one run are received in place."""
        tag = crc32(b"%d %d" % (turn.fingerprint, turn.number)) & 0x7FFFFFFF
        out = None if program.terms else buffer.new_empty(program.shape)
        data: dict[int, Tensor] = {}
        works = []
        for peer, boxes, numel in program.receives:
            place = part(out, boxes[0], 1) if out is not None and len(boxes) == 1 else None
            data[peer] = target = place if place is not None and place.is_contiguous() else buffer.new_empty(numel)
            works.append(self._post(turn, lambda t=target, p=peer: self.pg.recv([t], p, tag)))  # type: ignore[misc]
        for peer, boxes, _ in program.sends:
            piece = _plain(pack(buffer, boxes))
            self.sent.add(rank, piece.numel() * piece.element_size())
            works.append(self._post(turn, lambda t=piece, p=peer: self.pg.send([t], p, tag)))  # type: ignore[misc]
        if not works:
            return Arrived([finish(program, rank, buffer, data.__getitem__, reduction, None)])
        if out is not None:
            keep(program, buffer, out)  # while the wire is busy
        return Wire(self, turn, works, lambda: finish(program, rank, buffer, data.__getitem__, reduction, out))

    def _collective(self, turn: Turn, rank: int, program: Program, buffer: Tensor, reduction: Reduction) -> "Wire":
        if program.terms and program.even and buffer.dtype in NATIVE_SUMS:
            return self._reduce_scatter(turn, rank, program, buffer, reduction)
        if program.gathers:
            return self._all_gather(turn, rank, program, buffer)
        group = tuple(sorted(program.group))
        pg = process_group(group)
        outgoing = {peer: _plain(pack(buffer, boxes)).reshape(-1) for peer, boxes, _ in program.sends}
        counts = {peer: numel for peer, _, numel in program.receives}
        unit = buffer.element_size()
        packed = torch.cat([outgoing[q] for q in group if q in outgoing]) if outgoing else buffer.new_empty(0)
        arrived = buffer.new_empty(sum(counts.values()))
        self.sent.add(rank, packed.numel() * unit)
        sizes_in = [outgoing[q].numel() * unit if q in outgoing else 0 for q in group]
        sizes_out = [counts.get(q, 0) * unit for q in group]
        work = self._post(
            turn, lambda: pg.alltoall_base(arrived.view(torch.uint8), packed.view(torch.uint8), sizes_out, sizes_in)
        )
        pieces = dict(
            zip(
                [q for q in group if q in counts], arrived.split([counts[q] for q in group if q in counts]), strict=True
            )
        )
        return Wire(self, turn, [work], lambda: finish(program, rank, buffer, pieces.__getitem__, reduction, None))

    def _all_gather(self, turn: Turn, rank: int, program: Program, buffer: Tensor) -> "Wire":
        group = tuple(sorted(program.group))
        piece = _plain(pack(buffer, program.keep)).reshape(-1)
        arrived = piece.new_empty(len(group) * program.even)
        work = self._post(
            turn, lambda: process_group(group)._allgather_base(arrived.view(torch.uint8), piece.view(torch.uint8))
        )
        self.sent.add(rank, piece.numel() * (len(group) - 1) * piece.element_size())
        pieces = dict(zip(group, arrived.split(program.even), strict=True))
        if program.stacked(rank):
            return Wire(self, turn, [work], lambda: arrived.view(program.shape))
        return Wire(self, turn, [work], lambda: finish(program, rank, buffer, pieces.__getitem__, "sum", None))

    def _reduce_scatter(self, turn: Turn, rank: int, program: Program, buffer: Tensor, reduction: Reduction) -> "Wire":
        group = tuple(sorted(program.group))
        boxes = {peer: boxes for peer, boxes, _ in program.sends} | {rank: program.keep}
        packed = torch.cat([pack(buffer, boxes[q]).reshape(-1) for q in group])
        out = buffer.new_empty(program.even)
        options = dist.ReduceScatterOptions()
        options.reduceOp = OPS[reduction]
        work = self._post(turn, lambda: process_group(group)._reduce_scatter_base(out, packed, options))
        self.sent.add(rank, program.even * (len(group) - 1) * out.element_size())
        return Wire(self, turn, [work], lambda: _placed(program, out))


def _placed(program: Program, data: Tensor) -> Tensor:
    """A result that came in the order of the boxes read, put where they are written."""
    if len(program.keep) == 1:
        return data.reshape(program.shape)
    out = data.new_empty(program.shape)
    unpack(out, program.keep, data)
    return out


class Wire(NamedTuple):
    """An exchange on the wire."""

    owner: Dist
    turn: Turn
    works: list[Any]
    result: Callable[[], Tensor]

    def wait(self) -> list[Tensor]:
        limit = timedelta(seconds=self.owner.here.timeout)
        with self.owner.watch.during(self.turn):
            for work in self.works:
                work.wait(limit)
        return [self.result()]


def _key(group: tuple[int, ...]) -> int:
    return crc32(repr(sorted(group)).encode())


def _plain(piece: Tensor) -> Tensor:
    """One run of memory that holds the very values; conjugation and negation that torch has put off are done now."""
    return piece.resolve_conj().resolve_neg().contiguous()
