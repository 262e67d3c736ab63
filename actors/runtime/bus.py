"""The bus: ranks that run parts of one network, and how a step that fails on one of them ends on all.

A thread looks at the ledger ten times a second, as boxing's does, and where a rank gave up it ends the waits of this
process: Gloo closes a connection on which any wait runs out of time. A rank that died is noticed by the connections to
it, and a host that does not answer any more by heartbeats. Who fails because another did tells on what that one told,
so that all name the first cause. An interrupt from the keyboard ends the waits too, since Python would hear of it only
behind them.
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch

from ...boxing.exchange.dist import Dist
from ...boxing.exchange.execute import transport
from ...boxing.exchange.store_wait import await_key
from ...boxing.exchange.watch import root_cause
from ...placement.errors import ScheduleError, TransportError
from ...placement.world import at_close, store, world
from ..protocol.network import Network
from .channel import Broken, GlooLine
from .progress import Dead, Progress

__all__ = ["Bus", "bus"]

PERIOD = 0.1  # seconds between looks
CAUSE = 1.0, 4.0  # seconds in which a broken connection must be explained by what a rank told, here or elsewhere
LAST_TAG = 0x7FFFFFFF
STUCK = "made no progress"

_known: dict[tuple[int, ...], "Bus"] = {}


def bus(ranks: Sequence[int]) -> "Bus":
    """The bus of these ranks, made at first use by all of them, and kept until the world is left."""
    key = tuple(sorted(ranks))
    if key not in _known:
        _known[key] = made = Bus(key)
        at_close(made.close)
    return _known[key]


class Bus:
    """One bus serves all networks of its ranks, one step after the other. It is the guard of their runtimes."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        here, shared = world(), transport()
        if here.rank not in ranks or not isinstance(shared, Dist):
            raise ScheduleError(
                f"a bus among ranks {_words(ranks)}, made by {'one process' if here.rank is None else here.rank}\n"
                "  start a process for each rank (torchrun), and make the bus on all ranks that it joins, no others"
            )
        self.ranks, self.rank, self.ledger, self.limit = ranks, here.rank, shared.ledger, here.timeout
        self.guard = shared.watch.store
        self.others = tuple(rank for rank in ranks if rank != here.rank)
        self.store = PrefixStore(f"bus/{_words(ranks)}", store())
        try:
            self.group: Any = ProcessGroupGloo(
                self.store, ranks.index(here.rank), len(ranks), timedelta(seconds=here.timeout)
            )
        except RuntimeError as error:
            raise TransportError(f"ranks {_words(ranks)} did not meet in {here.timeout:g} s\n  {error}") from error
        self.line = GlooLine(self.group, ranks)
        self.broken: str | None = None
        self.hang_up: list[Callable[[], None]] = [self._hang_up]  # what ends the waits of this process
        self.agreed = 0  # on so many networks, on all ranks alike
        self._watched: Progress | None = None
        self._interrupts = Interrupts()
        self._hands = threading.RLock()  # held by who ends a step
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sbpflow-bus", daemon=True)
        self._thread.start()

    def agree(self, network: Network) -> None:
        """Raise on every rank if not all have the same network, naming the first line that differs."""
        self.agreed += 1
        turn = f"agree/{self.agreed}"
        try:
            with self.guard:
                self.store.set(f"{turn}/text/{self.rank}", network.text)
                self.store.set(f"{turn}/mark/{self.rank}", str(network.fingerprint))
                marks = [self._said(f"{turn}/mark/{rank}", rank) for rank in self.ranks]
                other = next((at for at, mark in enumerate(marks) if mark != marks[0]), None)
                if other is None:
                    return
                pair = self.ranks[0], self.ranks[other]
                texts = [self.store.get(f"{turn}/text/{rank}").decode() for rank in pair]
        except RuntimeError as error:
            said = self.guard.lost() or f"not all of ranks {_words(self.ranks)} came to {network.name}"
            raise TransportError(f"{said}\n  {error}") from error
        lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
        number, (first, second) = next((n, two) for n, two in enumerate(lines, 1) if two[0] != two[1])
        raise ScheduleError(
            f"ranks {pair[0]} and {pair[1]} have different networks, from line {number} on\n"
            f"  rank {pair[0]}: {first}\n  rank {pair[1]}: {second}\n"
            "  every rank must run the same program with the same model, placements and schedule"
        )

    def _said(self, key: str, rank: int) -> str:
        """The words of a rank at the store, which will come as long as it is there."""

        def gone() -> str | None:
            told = self.ledger.fault(rank)
            return root_cause(rank, told) if told else self.ledger.gone(rank)

        found = await_key(self.store, key, self.limit, gone)
        if found is None:
            raise RuntimeError(f"rank {rank} did not within {self.limit:g} s (flow.init(timeout=...) sets the limit)")
        return found

    def enter(self, watch: Progress) -> None:
        if self.broken is not None:
            raise TransportError(
                f"the ranks no longer talk to each other since an earlier step failed\n  {self.broken}\n"
                "  start the processes anew"
            )
        self._interrupts.begin()
        self._watched = watch

    def leave(self) -> None:
        self._interrupts.end()
        with self._hands:  # the thread must be out of torch before the process can end on an error
            self._watched = None

    def tell(self, what: str, error: BaseException) -> BaseException:
        """Have all ranks give up. What failed only because of another rank becomes an error that names the cause."""
        if isinstance(error, Broken):
            cause, watch = self._cause(error), self._watched
            if STUCK in cause and watch is not None:
                watch.report()
        else:
            told = self._fault() if isinstance(error, TransportError) else None
            said = str(error).partition("\n")[0]
            told = told or (said if isinstance(error, Dead) else None)
            cause = told or f"rank {self.rank} gave up{f' in {what}' if what else ''}: {type(error).__name__}: {said}"
        self._give_up(cause)
        return self._error(cause, what) if isinstance(error, Broken) else error

    def dead(self) -> str | None:
        return next((said for rank in self.others if (said := self.ledger.gone(rank))), None)

    def close(self) -> None:
        """Stop looking; the world is being left."""
        self._over.set()
        self._thread.join()
        self._interrupts.close()
        self.broken = "the world was left by flow.boxing.close()"
        _known.pop(self.ranks, None)

    def _watch(self) -> None:
        heard = False
        while not self._over.wait(PERIOD):
            with self._hands:
                watch = self._watched
                if watch is None:
                    heard = False
                    continue
                if heard and watch.error is None:  # the thread that is to be interrupted waits for a message
                    watch.fail(KeyboardInterrupt())
                heard = self._interrupts.heard()
                cause = self._fault()
                if cause is None:
                    watch.look()
                elif self.broken is None:
                    if STUCK in cause:
                        watch.report()
                    self._give_up(cause)
                    watch.fail(self._error(cause, ""), told=True)

    def _give_up(self, cause: str) -> None:
        with self._hands:
            self.broken = cause
            self.ledger.fail(cause)
            for end in self.hang_up:
                end()

    def _error(self, cause: str, what: str) -> TransportError:
        return TransportError(
            f"{cause}\n  noticed by rank {self.rank}{f' in {what}' if what else ''}\n"
            "  see what the first rank says, and start the processes anew"
        )

    def _fault(self) -> str | None:
        """The cause for which another rank gave up, as it told, or why nothing can come from one."""
        for rank in self.others:
            told = self.ledger.fault(rank)
            if told:
                return root_cause(rank, told)
        return next((said for rank in self.others if (said := self.ledger.lost(rank))), None)

    def _cause(self, error: Broken) -> str:
        """Why a connection broke: who hangs up has told why before, and who died is dead."""
        end = time.monotonic() + CAUSE[self.ledger.heartbeats is not None]
        while time.monotonic() < end:
            told = self._fault()
            if told is not None:
                return told
            gone = self.ledger.gone(error.peer) or self.dead()
            if gone is not None:
                return gone
            time.sleep(PERIOD / 10)
        return f"rank {self.rank} gave up: {str(error).partition('. ')[0]}"

    def _hang_up(self) -> None:
        for rank in self.others:
            with suppress(RuntimeError):
                place = self.line.place[rank]
                self.group.recv([torch.empty(1, device="cpu")], place, LAST_TAG).wait(timedelta(milliseconds=1))


def _words(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


class Interrupts:
    """Interrupts from the keyboard while the main thread waits in a place where Python hears of none, as in Gloo.

    It tells another thread of those that become a KeyboardInterrupt, between `begin` and `end`.
    """

    def __init__(self) -> None:
        self.ear, self.mouth = socket.socketpair()
        for end in (self.ear, self.mouth):
            end.setblocking(False)
        self.listens = False

    def begin(self) -> None:
        """The main thread may wait from now on; on another thread, or where the program has its own way, nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        other = signal.set_wakeup_fd(self.mouth.fileno(), warn_on_full_buffer=False)
        if other != -1:  # somebody listens already, as an event loop does
            signal.set_wakeup_fd(other)
            return
        self.listens = True
        self.heard()  # what came before

    def end(self) -> None:
        if self.listens:
            signal.set_wakeup_fd(-1)
            self.listens = False

    def heard(self) -> bool:
        """Whether there was one since the last question."""
        try:
            return self.listens and signal.SIGINT in self.ear.recv(1024)
        except BlockingIOError:
            return False

    def close(self) -> None:
        self.ear.close()
        self.mouth.close()
