"""A process that is rank 0 of four though there is nobody else, and rounds in which all ways are timed in turn."""

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch.distributed as dist

from sbpflow.boxing.boxing import Boxing
from sbpflow.boxing.exchange import collectives, execute
from sbpflow.boxing.exchange.transport import Arrived, Errand, Exchange, Given, Posting, Sent, Turn
from sbpflow.sbp.signature import Reduction

__all__ = ["RANKS", "Times", "aligned", "alone", "timed"]

RANKS = 4

Times: TypeAlias = dict[str, dict[str, list[float]]]  # by what is timed and way, microseconds of each round


def alone() -> None:
    """Make this process rank 0 of four, for both systems, though there is nobody else."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import sbpflow.placement.world  # noqa: F401

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    room = sys.modules["sbpflow.placement.world"]
    here = room._world = room.World(rank=0, size=RANKS, timeout=300.0, native=None)  # type: ignore[attr-defined]
    execute._transport = here, Alone()


class Alone:
    """The backend's own collectives without what guards them: nobody else writes into a ledger here."""

    def __init__(self) -> None:
        self.sent = Sent()

    def start(
        self, plan: Given, stage: int, jobs: list[Errand], reduction: Reduction, background: bool = False
    ) -> Arrived:
        return self._done(jobs[0], reduction, collectives.post)

    def all_reduce(self, plan: Given, stage: int, jobs: list[Errand], reduction: Reduction) -> Arrived:
        return self._done(jobs[0], reduction, collectives.all_reduce)

    def refuse(self, plan: Boxing, error: Exception) -> None:
        raise error

    def _done(self, job: Errand, reduction: Reduction, post: Callable[[Sent, Exchange], Posting]) -> Arrived:
        buffer = job.buffer.reshape(-1) if job.program.flat else job.buffer
        turn = Turn(0, 0, 0, job.program.group, b"")
        works, result = post(self.sent, Exchange(job.rank, job.program, buffer, reduction, turn))
        for work in works:
            work.wait()
        return Arrived([result()])


def timed(table: dict[str, dict[str, Callable[[], object]]], rounds: int, calls: int, *, meet: bool = False) -> Times:
    """Every way of everything, in turn; a warm round goes before."""
    found: Times = defaultdict(lambda: defaultdict(list))
    gc.collect()
    gc.freeze()
    for k in range(-1, rounds):
        for what, row in table.items():
            turn = list(row.items())
            for way, call in turn[k % len(turn) :] + turn[: k % len(turn)]:  # nobody is always first
                if meet:
                    dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                if k >= 0:
                    found[what][way].append((time.perf_counter() - start) / calls * 1e6)
    return found


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows as Markdown that is readable as it stands."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["| " + " | ".join(entry.rjust(w) for entry, w in zip(row, widths, strict=True)) + " |" for row in table]
    return [lines[0], "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|", *lines[1:]]
