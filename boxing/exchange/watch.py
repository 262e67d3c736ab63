"""Watching over an exchange: no rank waits for a peer that will never come.

While this rank waits on the wire, a thread looks at the ledger ten times a second. A peer that took the same turn with
another boxing will not come, nor will one that gave up, or whose host does not answer any more. The thread then closes
the connections of this rank, which ends the wait with an error, and the error is told in terms of who wanted what. A
peer that died is noticed by its connection, one that is stuck by the time limit.

On cards nobody waits on the host, and a wait that is cut short gives numbers that nobody computed. So there the thread
looks at what was given to the cards last, and has what it finds told before the process is ended, as by torch's own
watchdog of NCCL.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from ...placement.errors import TransportError
from ...placement.ledger import Ledger
from ...placement.network.page import stamp
from ...placement.world import World
from .store_wait import StoreGuard
from .transport import Turn

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Watch", "grace", "root_cause"]

PERIOD = 0.1
NO_ANSWER = "no answer within"
LATE = 1.0, 10.0  # seconds, at least and at most, in which another may tell why it did not answer
HEARD = 4.0  # seconds in which other hosts tell who died there; a busy machine takes long for its half a second
LAST_TAG = 0x7FFFFFFF
GRACE = 5.0  # seconds for a process to notice by itself that its cards wait for nobody


class Watch:
    """The thread and the words. One a process; the thread ends with the process and holds nothing up."""

    def __init__(self, ledger: Ledger, pg: "ProcessGroup", here: World) -> None:
        self.ledger, self.pg, self.here = ledger, pg, here
        self.store = StoreGuard(ledger)
        self.broken: str | None = None
        self.turn: Turn | None = None  # the exchange that the process waits for
        self.on_cards: dict[int, tuple[Turn, list[Any]]] = {}  # the latest exchange of each group of ranks
        self._missed: set[tuple[Turn, int]] = set()  # ranks that were gone at one look, for which turn
        self._gave_up: int | None = None  # the rank on whose account the thread ended a wait
        self._lost: str | None = None  # of a host on whose account it did
        self._over = threading.Event()
        self._hanging_up = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="sbpflow-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop looking; the world is being left."""
        self._over.set()
        self._thread.join()  # a thread that is inside torch when Python ends takes the process down with it
        self.broken = "the world was left by flow.boxing.close()"

    def check(self) -> None:
        """Refuse to start on a group that broke before."""
        if self.broken is not None:
            raise TransportError(
                f"the ranks no longer talk to each other since an earlier move failed\n  {self.broken}\n"
                "  start the processes anew"
            )

    def mismatch(self, turn: Turn, other: int) -> TransportError:
        """The error of a rank that saw, before it sent anything, that a peer wants something else."""
        cause = self._disagreement(turn, other)
        text = self._tell(turn, cause, (other,))
        self.ledger.fail(text)
        self.broken = cause  # going on would overwrite the entry that tells the peers
        return TransportError(f"{text}\n  every rank must ask for the same moves in the same order")

    def failure(self, turn: Turn, error: Exception) -> TransportError:
        """The error of a rank whose exchange broke: by a peer that died, gave up, went elsewhere or was too slow."""
        with self._hanging_up:
            pass  # the thread must be out of torch before the process can end on this error
        others = tuple(r for r in turn.group if r != self.here.rank)
        timed_out = "imed out" in str(error) or "imeout" in str(error)
        cause = self._lost or self._cause(turn, others, error, timed_out)
        text = self._tell(turn, cause, others)
        remote = None if self._lost else self.ledger.remote_fault()
        if remote is not None and (first := root_cause(*remote)) not in cause:
            text += f"\n  {first}"
        self.ledger.fail(text)
        self.broken = cause
        return TransportError(text)

    def _cause(self, turn: Turn, others: tuple[int, ...], error: Exception, timed_out: bool) -> str:
        if timed_out:  # by itself the one that is stuck may be about to say so
            self._gave_up = self._gave_up if self._knows_more(self._gave_up) else self._told_late()
        elif self.ledger.heartbeats is not None:  # a connection breaks before it is heard why
            self._await_word(others)
        differing = next((r for r in others if self._differs(turn, r)), None)
        gone = next((said for r in others if (said := self.ledger.gone(r))), None)
        if differing is not None:
            return self._disagreement(turn, differing)
        if gone is not None:
            return gone
        if self._gave_up is None and not timed_out and self.ledger.heartbeats is not None:
            self._gave_up = next((r for r in others if self.ledger.fault(r)), None)
        if self._gave_up is not None:
            return root_cause(self._gave_up, self.ledger.fault(self._gave_up) or "")
        if timed_out:
            return f"{NO_ANSWER} {self.here.timeout:g} s (flow.init(timeout=...) sets the limit)"
        return "the connection broke: " + str(error).rpartition("] ")[2].partition(". ")[0]

    def _await_word(self, others: tuple[int, ...]) -> None:
        """Wait a moment for what explains a broken connection."""
        end = time.monotonic() + HEARD
        while time.monotonic() < end and not any(self.ledger.gone(r) or self.ledger.fault(r) for r in others):
            time.sleep(PERIOD / 10)

    def patrol(self, turn: Turn, peers: set[int]) -> None:
        """Raise if a peer that is waited for will not come; one that is gone may have sent before, so look twice."""
        if any(self._differs(turn, r) for r in turn.group if r != self.here.rank):
            raise RuntimeError("ranks ask for different moves")
        for rank in peers:
            fault = self.ledger.fault(rank)
            if fault or self.ledger.gone(rank):
                if (turn, rank) in self._missed:
                    self._gave_up = rank if fault else None
                    raise RuntimeError(f"rank {rank} gave up: {fault}" if fault else f"rank {rank} died")
                self._missed.add((turn, rank))

    def _told_late(self) -> int | None:
        """A rank that gives up while others run out of time.

        A process notices its own stuck step at about the same moment, and that one knows at which line it is."""
        end = time.monotonic() + grace(self.here.timeout)
        while time.monotonic() < end:
            others = (rank for rank in range(self.here.size or 0) if rank != self.here.rank)
            found = next(filter(self._knows_more, others), None)
            if found is not None:
                return found
            time.sleep(PERIOD / 10)
        return None

    def _knows_more(self, rank: int | None) -> bool:
        """Whether a rank gave up for more than that nothing came."""
        return rank is not None and not (self.ledger.fault(rank) or NO_ANSWER).startswith(NO_ANSWER)

    def _disagreement(self, turn: Turn, rank: int) -> str:
        if self.ledger.refused(rank, turn.key, turn.number):
            return f"rank {rank} gave up"
        return f"ranks {self.here.rank} and {rank} ask for different moves"

    def _tell(self, turn: Turn, cause: str, ranks: tuple[int, ...]) -> str:
        what, where = turn.words
        lines = [f"{cause}", f"  in {what}", f"  at {where}, move {turn.number} among ranks {sorted(turn.group)}"]
        lines += [f"  rank {rank}: {self._status(turn, rank)}" for rank in ranks[:16]]
        return "\n".join(lines + self._seeds(turn))

    def _seeds(self, turn: Turn) -> list[str]:
        """Ranks that alone compare seeds: where all others go on, those were seeded alone, or otherwise than they."""
        latest = {rank: entry for rank in turn.group if (entry := self.ledger.latest(rank))}
        here = turn.key, turn.number
        texts = {rank: entry.text for rank, entry in latest.items() if (entry.group, entry.turn) == here}
        if self.here.rank is not None:
            texts[self.here.rank] = turn.text.decode(errors="replace")
        seeded = [rank for rank, text in texts.items() if text.startswith("comparing seeds")]
        if not seeded or len(seeded) == len(turn.group):
            return []
        names = f"rank{'s' * (len(seeded) > 1)} {', '.join(map(str, sorted(seeded)))}"
        return [
            f"  only {names} compared seeds, as is done at the first draw after the seed was changed:\n"
            "  torch.manual_seed was called there alone, or with another number; call it alike on every rank"
        ]

    def _status(self, turn: Turn, rank: int) -> str:
        lost, gone = self.ledger.lost(rank), self.ledger.gone(rank)
        how = "is not heard any more; before that it was " if lost else "died; before that it was " if gone else ""
        where = self.ledger.where(rank)
        gone = ", ".join(filter(None, [where, how]))
        gone += ", " if gone and not how else ""
        entry = self.ledger.latest(rank)
        if entry is None:
            return f"{gone}not at any move yet"
        what, _, where = entry.text.partition("\n")
        if not entry.fingerprint:
            return gone + entry.text.replace("\n", "\n  ")
        same = entry.group == turn.key
        behind = turn.number - entry.turn
        count = "" if same and not behind else f" (move {entry.turn} of {'these' if same else 'other'} ranks)"
        return f"{gone}in {what} at {where}{count}"

    def _differs(self, turn: Turn, rank: int) -> bool:
        return self.ledger.differs(rank, turn.key, stamp(turn.number, turn.fingerprint))

    def _look(self) -> None:
        doubtful: Turn | None = None
        while not self._over.wait(PERIOD):
            self.store.look()
            turn = self.turn
            if turn is None:
                self._look_at_cards()
                continue
            others = [r for r in turn.group if r != self.here.rank]
            # One that gave up may have sent before what this rank needs, which then arrives until the next look.
            gave_up = next((r for r in others if self.ledger.fault(r)), None)
            sure = gave_up is not None and doubtful is turn
            doubtful = turn if gave_up is not None else None
            lost = next((said for r in others if (said := self.ledger.lost(r))), None)
            if (sure or lost or any(self._differs(turn, r) for r in others)) and self.turn is turn:
                with self._hanging_up:
                    self._gave_up, self._lost = gave_up, lost
                    self._hang_up(others)

    def _look_at_cards(self) -> None:
        """Tell of an exchange on cards that will not end, and end the process where that hears nothing else."""
        for turn, works in list(self.on_cards.values()):
            lost = self._never(turn, works)
            if lost is None or self.broken is not None or self._over.wait(PERIOD) or self._never(turn, works) is None:
                continue
            others = tuple(r for r in turn.group if r != self.here.rank)
            text = self._tell(turn, lost, others)
            self.broken = lost
            self.ledger.fail(text)
            print(f"rank {self.here.rank}: {text}", file=sys.stderr, flush=True)
            if not self._over.wait(GRACE) and not all(work.is_completed() for work in works):
                print(f"rank {self.here.rank} is ended: its cards wait for what will not come", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGABRT)

    def _never(self, turn: Turn, works: list[Any]) -> str | None:
        """Why what was given to the cards will not come; None while it can, or when it has."""
        for rank in (r for r in turn.group if r != self.here.rank):
            fault = self.ledger.fault(rank)
            cause = root_cause(rank, fault) if fault else self.ledger.gone(rank) or self.ledger.lost(rank)
            if cause is None and self._differs(turn, rank):
                cause = self._disagreement(turn, rank)
            if cause is not None and not all(work.is_completed() for work in works):
                return cause
        return None

    def _hang_up(self, peers: list[int]) -> None:
        """End the other thread's wait: Gloo closes a connection on which any wait runs out of time."""
        for peer in peers:
            with suppress(RuntimeError):
                self.pg.recv([torch.empty(1, device="cpu")], peer, LAST_TAG).wait(timedelta(milliseconds=1))


def grace(limit: float) -> float:
    """Seconds by which who only waits for others gives up later than at its limit, so that the stuck one is named.

    The others may have begun to wait sooner than it got stuck, and their clocks then run out before its own."""
    least, most = LATE
    return min(max(limit / 4, least), most)


def root_cause(rank: int, told: str) -> str:
    """Why a rank gave up, in a line: what it told of another is told on."""
    first = told.partition("\n")[0]
    return first if first.startswith(("rank ", "host ", "the cable ")) else f"rank {rank} gave up: {first}"
