"""The ledger: what each rank of this host is doing now, in a page of shared memory that all its ranks read.

Before a rank takes part in an exchange it writes down which, then looks at what its peers wrote for the same turn. Of
two ranks that want different things the later one sees the earlier one's entry and refuses, so they never meet on the
wire, where a mismatch ends in an abort. After a failure the ledger tells who waited for what. Ranks of other hosts do
not show in it; they are told of a failure through the store.
"""

import mmap
import os
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

from .errors import TransportError

__all__ = ["Entry", "Ledger", "memory_folder", "runs", "stamp", "this_host"]

# A page in words of 8 bytes, each written in one go: process id, which entry is the latest, the entries, the fault.
# An entry is its group, turn and fingerprint in one word (so that nobody reads one without the other), and its text.
WORD = 8
TEXT, FAULT = 256, 1024
ENTRY = 2 + TEXT // WORD
BUCKETS = 8
REFUSED_AT = 2 + BUCKETS * ENTRY  # the last turn refused: group, turn
FAULT_AT = REFUSED_AT + 2
PAGE = FAULT_AT + 1 + FAULT // WORD
HALF = 0xFFFFFFFF
PATIENCE = 1.0  # seconds for an answer of the store


class Entry(NamedTuple):
    """One rank's latest turn in one group."""

    group: int
    turn: int
    fingerprint: int
    text: str


class Ledger:
    """One page a rank. The file is unlinked once all have mapped it, so that a crash leaves nothing behind."""

    def __init__(self, rank: int, size: int, store: "Store") -> None:
        self.rank, self.store = rank, store
        try:
            self._join(size)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            raise TransportError(_absent(store, rank, size)) from error

    def _join(self, size: int) -> None:
        rank, store = self.rank, self.store
        self.host = this_host()
        store.set(f"host/{rank}", self.host)
        hosts = [store.get(f"host/{r}").decode() for r in range(size)]
        self.local = tuple(r for r in range(size) if hosts[r] == self.host)
        self.many_hosts = len(self.local) < size
        self._page = {r: i * PAGE for i, r in enumerate(self.local)}
        shared = self.share("ledger", len(self.local) * PAGE * WORD)
        if shared is None:
            raise TransportError(
                f"no room for {len(self.local) * PAGE * WORD} bytes of shared memory in {memory_folder()}"
            )
        self._map = shared
        self._words = memoryview(self._map).cast("Q")
        self._words[self._page[rank]] = os.getpid()
        self._turns: dict[int, int] = {}
        self._entering = threading.Lock()
        self._meet("written")

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
        words, entry = self._words, 2 + group % BUCKETS * ENTRY
        at = self._page[self.rank] + entry
        words[at + 1] = 0  # nobody takes what is written now for a whole entry
        words[at] = group
        self._write(at + 2, text, TEXT)
        words[at + 1] = word = stamp(turn, fingerprint)
        words[self._page[self.rank] + 1] = entry
        if not fingerprint:  # kept, since a rank that refused one turn goes on to the next before all have looked
            refused = self._page[self.rank] + REFUSED_AT
            words[refused + 1] = 0
            words[refused] = group
            words[refused + 1] = word
        return turn, next((peer for peer in peers if self.differs(peer, group, word)), None)

    def latest(self, rank: int) -> Entry | None:
        """The last request of a rank of this host, in any group."""
        page = self._page.get(rank)
        if page is None:
            return None
        for _ in range(100):  # it may be writing right now
            entry = self._words[page + 1]
            if not entry:
                return None
            word, group = self._words[page + entry + 1], self._words[page + entry]
            found = Entry(group, word >> 32, word & HALF, self._read(page + entry + 2, TEXT))
            if word and self._words[page + entry + 1] == word:
                return found
        return None

    def differs(self, rank: int, group: int, word: int) -> bool:
        """Whether a rank of this host took the same turn of the group for something else."""
        page = self._page.get(rank)
        if page is None:
            return False
        return any(self._differs(page + at, group, word) for at in (2 + group % BUCKETS * ENTRY, REFUSED_AT))

    def _differs(self, at: int, group: int, word: int) -> bool:
        theirs = self._words[at + 1]
        if theirs == word or theirs >> 32 != word >> 32 or self._words[at] != group:
            return False
        return self._words[at + 1] == theirs  # else the peer went on between the two looks

    def refused(self, rank: int, group: int, turn: int) -> bool:
        """Whether a rank of this host refused this turn, even if it went on since."""
        page = self._page.get(rank)
        return page is not None and self._differs(page + REFUSED_AT, group, stamp(turn, HALF))

    def _write(self, at: int, text: bytes, room: int) -> None:
        text = text[: room - 1]
        self._map[at * WORD : at * WORD + len(text) + 1] = text + b"\0"

    def _read(self, at: int, room: int) -> str:
        raw: bytes = self._map[at * WORD : at * WORD + room]
        return raw.partition(b"\0")[0].decode(errors="replace")

    def alive(self, rank: int) -> bool:
        """Whether the process of a rank of this host still runs; a rank of another host counts as alive."""
        page = self._page.get(rank)
        if page is None:
            return True
        return runs(self._words[page])

    def fail(self, text: str) -> None:
        """Tell every rank that this one gave up, and why."""
        at = self._page[self.rank] + FAULT_AT
        self._write(at + 1, text.encode(), FAULT)
        self._words[at] = 1
        if self.many_hosts:
            with suppress(RuntimeError):  # the store may have gone down with its host
                self.store.set(f"fault/{self.rank}", text)
                self.store.set("fault", str(self.rank))

    def fault(self, rank: int) -> str | None:
        """Why a rank of this host gave up, or None if it did not."""
        page = self._page.get(rank)
        if page is None:
            return None
        return self._read(page + FAULT_AT + 1, FAULT) if self._words[page + FAULT_AT] else None

    def remote_fault(self) -> tuple[int, str] | None:
        """The rank of another host that gave up last, and why; asks the store."""
        if not self.many_hosts:
            return None
        found: list[tuple[int, str]] = []
        asking = threading.Thread(target=self._ask, args=[found], name="sbpflow-store", daemon=True)
        asking.start()
        asking.join(PATIENCE)  # a store whose host is stuck never answers
        return found[0] if found and found[0][0] not in self._page else None

    def _ask(self, found: list[tuple[int, str]]) -> None:
        with suppress(RuntimeError):
            if self.store.check(["fault"]):
                rank = int(self.store.get("fault"))
                found.append((rank, self.store.get(f"fault/{rank}").decode()))


def stamp(turn: int, fingerprint: int) -> int:
    """A turn and what it is for, in one word."""
    return (turn & HALF) << 32 | fingerprint & HALF


def _absent(store: "Store", rank: int, size: int) -> str:
    missing: list[int] = []
    with suppress(RuntimeError):  # the store may be what is gone
        missing = [r for r in range(size) if not store.check([f"host/{r}"])]
    who = f"ranks {missing} did" if len(missing) > 1 else f"rank {missing[0]} did" if missing else "another rank did"
    return (
        f"{who} not come to the first move in time (flow.init(timeout=...) sets the limit)\n"
        f"  this is rank {rank} of {size}; see what the others say"
    )


def memory_folder() -> str:
    """A folder of files in memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


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


def this_host() -> str:
    """The host that this process is on; what SBPFLOW_HOST says, where several stand for hosts of their own."""
    return os.environ.get("SBPFLOW_HOST") or f"{socket.gethostname()}:{_boot_id()}"


def runs(pid: int) -> bool:
    """Whether a process of this host still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie's memory is gone though its number is not


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
