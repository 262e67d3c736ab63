"""The ledger: what each rank is doing now, in pages of memory that all ranks of a host share.

Before a rank takes part in an exchange it writes down which, then looks at what its peers wrote for the same turn. Of
two ranks that want different things the later one sees the earlier one's entry and refuses, so they never meet on the
wire, where a mismatch ends in an abort. After a failure the ledger tells who waited for what. Pages of ranks on other
hosts are copies, which heartbeats bring: they are half a second late.
"""

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import TransportError
from .network.heartbeat import Heartbeats
from .network.page import PAGE, Entry, Page, stamp
from .network.this_host import memory_folder, runs, this_host

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Ledger"]


class Ledger:
    """One page a rank. The file is unlinked once all have mapped it, so that a crash leaves nothing behind.

    `silence` are the seconds in which a host that does not answer any more is told; 0 where nobody asks. `wires` gives
    what is known of the links of each rank's host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: "Store",
        silence: float = 0.0,
        wires: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self.rank, self.store, self.wires = rank, store, wires
        try:
            self._join(size, silence)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(_absent(store, rank, size)) from error

    def _join(self, size: int, silence: float) -> None:
        rank, store = self.rank, self.store
        self.host = this_host()
        store.set(f"host/{rank}", self.host)
        hosts = [store.get(f"host/{r}").decode() for r in range(size)]
        self.local = tuple(r for r in range(size) if hosts[r] == self.host)
        shared = self.share("ledger", len(self.local) * PAGE)
        if shared is None:
            raise TransportError(f"no room for {len(self.local) * PAGE} bytes of shared memory in {memory_folder()}")
        whole = memoryview(shared)
        self._pages = {r: Page(whole[i * PAGE : (i + 1) * PAGE]) for i, r in enumerate(self.local)}
        self._pages[rank].pid = os.getpid()
        self._turns: dict[int, int] = {}
        self._entering = threading.Lock()
        self._meet("written")
        self.heartbeats: Heartbeats | None = None
        if len(self.local) < size and silence:
            elsewhere = {r: Page(memoryview(bytearray(PAGE))) for r in range(size) if r not in self._pages}
            self._pages |= elsewhere
            known = lambda: dict(zip(hosts, self.wires(), strict=False))  # noqa: E731
            self.heartbeats = Heartbeats(rank, hosts, self._pages, store, silence, known)

    def close(self) -> None:
        """Leave the ranks of other hosts."""
        if self.heartbeats is not None:
            self.heartbeats.close()

    def share(self, name: str, size: int) -> mmap.mmap | None:
        """New memory of `size` bytes that all ranks of this host map; None on all of them where it does not fit."""
        key = f"{name}/{self.host}"
        ours = self.rank == self.local[0]
        path = _make_file(size) if ours else self.store.get(key).decode()
        try:
            if ours:
                self.store.set(key, path)
            shared = _map_file(path, size) if path else None
            self._meet(f"{name} mapped")
        finally:
            if path and ours:
                Path(path).unlink()
        return shared

    def _meet(self, what: str) -> None:
        key = f"{what}/{self.host}"
        if self.store.add(key, 1) == len(self.local):
            self.store.set(f"{key}/all", "1")
        self.store.get(f"{key}/all")

    def enter(self, group: int, peers: tuple[int, ...], fingerprint: int, text: bytes) -> tuple[int, int | None]:
        """Write down this rank's next turn in a group; returns the turn, and a peer whose entry for it differs."""
        with self._entering:  # threads have turns of their own, and the page in common
            return self._entered(group, peers, fingerprint, text)

    def _entered(self, group: int, peers: tuple[int, ...], fingerprint: int, text: bytes) -> tuple[int, int | None]:
        turn = self._turns.get(group, 0) + 1
        self._turns[group] = turn
        word = stamp(turn, fingerprint)
        self._pages[self.rank].enter(group, word, text)
        return turn, next((peer for peer in peers if self.differs(peer, group, word)), None)

    def latest(self, rank: int) -> Entry | None:
        """The last request of a rank, in any group, if it is known here."""
        page = self._pages.get(rank)
        return None if page is None else page.latest()

    def differs(self, rank: int, group: int, word: int) -> bool:
        """Whether a rank took the same turn of the group for something else, as far as is known here."""
        page = self._pages.get(rank)
        return page is not None and page.differs(group, word)

    def refused(self, rank: int, group: int, turn: int) -> bool:
        """Whether a rank refused this turn, even if it went on since."""
        page = self._pages.get(rank)
        return page is not None and page.refused(group, turn)

    def gone(self, rank: int) -> str | None:
        """How a rank went away, such as "rank 2 died"; None if it did not, or nobody here knows."""
        if rank in self.local:
            return None if runs(self._pages[rank].pid) else f"rank {rank} died"
        return self.heartbeats.gone(rank) if self.heartbeats is not None else None

    def lost(self, rank: int) -> str | None:
        """Why nothing can come from a rank any more, though no connection was closed: its host is silent."""
        return self.heartbeats.lost(rank) if self.heartbeats is not None and rank not in self.local else None

    def where(self, rank: int) -> str:
        """The host of a rank in words, with what is wrong with it; nothing for one of this host."""
        if rank in self.local:
            return ""
        return "on another host" if self.heartbeats is None else self.heartbeats.state(rank)

    def fail(self, text: str) -> None:
        """Tell every rank that this one gave up, and why."""
        self._pages[self.rank].fail(text)
        if self.heartbeats is not None:
            self.heartbeats.tell()

    def fault(self, rank: int) -> str | None:
        """Why a rank gave up, or None if it did not, or nobody here knows."""
        page = self._pages.get(rank)
        return None if page is None else page.fault()

    def remote_fault(self) -> tuple[int, str] | None:
        """The rank of another host of which it was heard first that it gave up, and why."""
        rank = None if self.heartbeats is None else self.heartbeats.first_fault
        told = None if rank is None else self.fault(rank)
        return None if rank is None or told is None else (rank, told)


def _absent(store: "Store", rank: int, size: int) -> str:
    missing: list[int] = []
    with suppress(RuntimeError):  # the store may be what is gone
        missing = [r for r in range(size) if not store.check([f"host/{r}"])]
    who = f"ranks {missing} did" if len(missing) > 1 else f"rank {missing[0]} did" if missing else "another rank did"
    return (
        f"{who} not come to the first move in time (flow.init(timeout=...) sets the limit)\n"
        f"  this is rank {rank} of {size}; see what the others say"
    )


def _make_file(size: int) -> str:
    """A file of this size whose room is taken now (a page that is not there kills who touches it), or ""."""
    handle, path = tempfile.mkstemp(prefix="sbpflow-", dir=memory_folder())
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError:
        Path(path).unlink()
        return ""
    finally:
        os.close(handle)
    return path


def _map_file(path: str, size: int) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
