"""The transport between processes, each of which owns one rank. An exchange goes one of three ways:

    CPU, ranks of one host      shared memory
    CPU, ranks of many hosts    sends and receives of torch.distributed, all posted at once
    CUDA; more than 16 ranks    one collective of the backend, NCCL or Gloo

Gloo's own collectives go round a ring and take up to five times as long on busy cores. torch.distributed is called
directly, because its functional collectives cost 80-100 us each. On all three ways messages carry boxing, step and
turn, so that ranks that disagree never meet.
"""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from ...placement.cluster import default_cluster
from ...placement.device import card_here
from ...placement.errors import SbpflowError
from ...placement.ledger import Ledger
from ...placement.links import wires
from ...placement.world import World, at_close, process_group, store, world
from ...sbp.signature import Reduction
from ..boxing import Boxing
from ..record import purpose, user_line
from . import collectives
from .buffer import finish, keep, landing, pack, plain
from .shared_memory import Mail, Shared
from .transport import MANY, Arrived, Errand, Exchange, Given, Posting, Sent, Turn, lane_here, waits
from .watch import Watch

__all__ = ["Dist"]


class Dist:
    """One rank of many. Every exchange is entered in the ledger first; a failed one breaks the group for good."""

    def __init__(self) -> None:
        here = world()
        assert here.rank is not None
        assert here.size is not None
        self.rank, self.here = here.rank, here
        self.sent = Sent()
        self.pg = process_group(range(here.size))
        self.ledger = Ledger(here.rank, here.size, store(), here.silence, partial(_wires, here))
        self.mail = Mail.open(self.ledger)
        self.watch = Watch(self.ledger, self.pg, here)
        at_close(self.watch.end)
        at_close(self.ledger.close)

    def start(
        self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction, background: bool = False
    ) -> "Wire | Post | Arrived":
        """The exchange of this rank, if it has one. In the background it goes by Gloo, whose threads do the work."""
        if not jobs:
            return Arrived([])
        job = jobs[0]
        exchange = self._enter(boxing, stage, job, reduction)
        if self._native(job):
            return self._posted(exchange, lambda: collectives.post(self.sent, exchange))
        aside = background or lane_here()  # mailboxes are of one thread
        if self.mail is not None and self.here.native is None and not aside and self.mail.serves(exchange):
            return Post(self.watch, Shared(self.mail, self.sent, exchange), self.here.timeout)
        return self._posted(exchange, lambda: _posted_singly(self.pg, self.sent, exchange))

    def all_reduce(
        self, boxing: Given, stage: int, jobs: list[Errand], reduction: Reduction
    ) -> "Wire | Arrived | None":
        """One collective where the backend's are used and it can reduce the dtype."""
        if not jobs or not self._native(jobs[0]) or not collectives.can_sum(jobs[0].buffer.dtype):
            return None
        exchange = self._enter(boxing, stage, jobs[0], reduction)
        return self._posted(exchange, lambda: collectives.all_reduce(self.sent, exchange))

    def refuse(self, boxing: Boxing, error: Exception) -> None:
        """Take the turn of the first exchange with an entry that fits nobody's, so that waiting peers learn of it."""
        for program in (program for programs in boxing.programs(self.rank) for program in programs):
            if program.group:
                self.ledger.enter(_key(program.group), (), 0, f"refused: {error}".encode())
                return

    def _native(self, job: Errand) -> bool:
        if not job.buffer.is_cpu:
            return True
        return len(job.program.group) > MANY if self.here.native is None else self.here.native

    def _enter(self, boxing: Given, stage: int, job: Errand, reduction: Reduction) -> Exchange:
        self.watch.check()
        group = job.program.group
        key = _key(group, lane_here())
        fingerprint = (boxing.fingerprint + stage) & 0xFFFFFFFF or 1  # 0 is the mark of a refusal
        text = b"%s%s\n%s" % (purpose().encode(), boxing.text, user_line().encode())
        number, other = self.ledger.enter(key, group, fingerprint, text)
        turn = Turn(key, number, fingerprint, group, text)
        if other is not None:
            raise self.watch.mismatch(turn, other)
        buffer = job.buffer.reshape(-1) if job.program.flat else job.buffer
        return Exchange(job.rank, job.program, buffer, reduction, turn)

    def _posted(self, exchange: Exchange, post: Callable[[], Posting]) -> "Wire | Arrived":
        try:
            works, result = post()
        except RuntimeError as error:
            raise self.watch.failure(exchange.turn, error) from error
        if not works:
            return Arrived([result()])
        # NCCL: without a limit the current stream waits and not the host; its own watchdog keeps the time.
        limit = timedelta(seconds=self.here.timeout) if exchange.buffer.is_cpu else None
        if limit is None:
            self.watch.on_cards[exchange.turn.key] = exchange.turn, works
        return Wire(self.watch, exchange.turn, works, result, limit)


class Wire(NamedTuple):
    """An exchange on the wire, and how its result is made of what arrives."""

    watch: Watch
    turn: Turn
    works: list[Any]
    result: Callable[[], Tensor]
    limit: timedelta | None

    def wait(self) -> list[Tensor]:
        """The rank's result; an exchange that breaks is told in terms of who wanted what."""
        if self.limit is not None:
            self.watch.turn = self.turn
        with waits:  # for the cause too: else the watch over this rank's step takes it for the stuck one
            try:
                for work in self.works:
                    work.wait() if self.limit is None else work.wait(self.limit)
            except RuntimeError as error:
                raise self.watch.failure(self.turn, error) from error
            finally:
                self.watch.turn = None
        return [self.result()]


class Post(NamedTuple):
    """An exchange in the mailboxes."""

    watch: Watch
    shared: Shared
    limit: float

    def wait(self) -> list[Tensor]:
        """The rank's result, with errors as from the wire."""
        turn = self.shared.exchange.turn
        with waits:  # for the cause too, as on the wire
            try:
                return [self.shared.wait(lambda peers: self.watch.patrol(turn, peers), self.limit)]
            except RuntimeError as error:
                raise self.watch.failure(turn, error) from error


def _posted_singly(pg: Any, sent: Sent, exchange: Exchange) -> Posting:
    """Sends and receives by global rank, under a tag that only the same turn of the same boxing carries.

    A piece that lies in one run of the result is received in place; pieces that the rank keeps are copied while the
    wire is busy. Receives are posted first: a peer sends once Gloo has told it that there is room, and what Gloo tells
    goes behind what this rank sends. The other way round a wire of 50 Mbit/s carries 24 each way, so 45.
    """
    rank, program, buffer, reduction, turn = exchange
    tag = crc32(b"%d %d %d" % (turn.fingerprint, turn.number, turn.key)) & 0x7FFFFFFF
    data: dict[int, Tensor] = {}
    works: list[Any] = []
    out = None if program.terms or program.adds else buffer.new_empty(program.shape)
    for coming in program.receives:
        data[coming.peer] = target = landing(coming, out, buffer)
        works.append(pg.recv([target], coming.peer, tag))
    for peer, boxes, _ in program.sends:
        piece = plain(pack(buffer, boxes))
        sent.add(rank, piece.nbytes)
        works.append(pg.send([piece], peer, tag))
    if out is not None:
        keep(program, buffer, out)
    return works, lambda: finish(program, rank, buffer, data.__getitem__, reduction, out, data)


def _wires(here: World) -> list[float]:
    """Bandwidths, as far as known, of the links of each rank's host, if that can be said for this run."""
    with suppress(SbpflowError):
        if here.run is not None:
            return wires(default_cluster(card.name if (card := card_here()) else "cpu"), here.run.hosts)
    return []


@lru_cache(maxsize=4096)
def _key(group: tuple[int, ...], lane: int = 0) -> int:
    return crc32((repr(sorted(group)) + f" {lane}" * bool(lane)).encode())
