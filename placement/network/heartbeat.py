"""Heartbeats: what ranks of other hosts are at, who has died there, and which host does not answer any more.

    host a   0 -------- 2   host b       each process has a line to one of each other host, and says on it twice a
             1 -------- 3                second what all ranks of its own host are at, if that has changed

A line that breaks says nothing yet, so whoever has it asks the other host anew: one that takes a connection lives, one
that refuses it lives without the process, and one that does not answer is silent, until it is heard again. No process
is taken for dead because it is slow: kernels answer for processes that are stopped or that compute.
"""

import json
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .host_traffic import LinkWatch
from .interface import has_cable, run_address
from .line import KNOCK, HostLine, UnknownCaller, heard_key, listen, open_line
from .page import Page
from .this_host import runs, stopped

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Heartbeats", "host_name", "partners"]

PERIOD = 0.5  # seconds between two words on a line
PROMPT = 10.0  # seconds in which a connection must have said its key
SHARES = 2, 4  # of the seconds in which a silent host is told: for a line to break, and for a question after it


class Heartbeats:
    """The lines of this process. Pages of ranks on other hosts are written here, and read by the ledger."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        pages: Mapping[int, Page],
        store: "Store",
        silence: float,
        known: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.rank, self.hosts, self.pages, self.silence = rank, hosts, pages, silence
        self.here = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        self.first_fault: int | None = None  # the rank of another host that was the first to give up, as heard here
        self.silent = dict[str, float]()  # hosts that do not answer, and since when
        self.dead, self.stopped = set[int](), set[int]()
        self._lines = dict[int, HostLine]()
        self._heard = dict[int, float]()
        self._doubts: list[threading.Thread] = []
        self._opened: list[tuple[int, socket.socket]] = []
        self._left = set[int]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._ear, self._mouth = socket.socketpair()
        for end in (self._ear, self._mouth):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._said = dict[int, bytes]()
        self._meet(store)
        names = {host: self._in_words(host) for host in dict.fromkeys(hosts)}
        places = {r: address for r, (address, _) in self._places.items()} | {rank: self._listener.getsockname()[0]}
        self.links = LinkWatch(rank, hosts, names, pages, places, known)
        self._thread = threading.Thread(target=self._serve, name="sbpflow-heartbeat", daemon=True)
        self._thread.start()

    def _meet(self, store: "Store") -> None:
        self._key = store.compare_set("heartbeat/key", "", secrets.token_hex(16)).decode().encode()
        self._listener = listen(run_address())
        store.set(f"heartbeat/{self.rank}", json.dumps(self._listener.getsockname()[:2]))
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._ear, selectors.EVENT_READ, "ear")
        opens, awaits = partners(self.rank, self.hosts)
        self._opens = set(opens)
        self._places = {r: self._place(store, r) for r in (*opens, *awaits)}
        for peer in opens:
            try:
                self._opened.append((peer, self._open(peer)))
            except OSError as error:
                warnings.warn(
                    f"rank {self.rank} cannot reach rank {peer} on host {self.name(peer)} at "
                    f"{':'.join(map(str, self._places[peer]))} ({error}): a cable cut there will be told by the "
                    "time limit only\n  GLOO_SOCKET_IFNAME names the interface of a run, whose ports hosts must "
                    "let each other reach",
                    stacklevel=2,
                )

    def _place(self, store: "Store", rank: int) -> tuple[str, int]:
        address, port = json.loads(store.get(f"heartbeat/{rank}"))
        return address, port

    def _open(self, peer: int) -> socket.socket:
        """A connection to another process, of which it hears the key only where it is to be a line."""
        within = self.silence / SHARES[1]
        if peer in self._opens:
            return open_line(self._places[peer], self._key, self.rank, within)
        return socket.create_connection(self._places[peer], within)

    # What others ask

    def name(self, rank: int) -> str:
        """The host of a rank, in words."""
        return host_name(self.hosts[rank])

    def lost(self, rank: int) -> str | None:
        """Why nothing can come from a rank any more: its host is silent, which is told with all that are."""
        if self.hosts[rank] not in self.silent:
            return None
        others = [host for host in dict.fromkeys(self.hosts) if host != self.hosts[self.rank]]
        silent = [host for host in others if host in self.silent]
        names = " and ".join(map(self._in_words, silent))
        mine = host_name(self.hosts[self.rank])
        if not has_cable():
            return f"the cable of this host, {mine}, is out: {names} cannot be reached"
        do = "do" if len(silent) > 1 else "does"
        if len(silent) == len(others) > 1:
            return f"{names} {do} not answer, which are all others: the cable of {mine} was cut, or they are down"
        return f"{names} {do} not answer any more: its cable was cut, or it is down"

    def lost_at(self, address: str) -> str | None:
        """The same for whatever is on a host of this address."""
        rank = next((rank for rank, (where, _) in self._places.items() if where == address), None)
        return None if rank is None else self.lost(rank)

    def _in_words(self, host: str) -> str:
        return f"host {host_name(host)} ({_ranks([r for r, of in enumerate(self.hosts) if of == host])})"

    def gone(self, rank: int) -> str | None:
        """How a rank of another host went away, if it did."""
        return self.lost(rank) or (f"rank {rank} died" if rank in self.dead else None)

    def state(self, rank: int) -> str:
        """Where a rank is, and how it is if that is not well."""
        where = f"on host {self.name(rank)}"
        if rank in self.stopped:
            return f"{where}, stopped by a signal"
        heard = [at for r, at in self._heard.items() if self.hosts[r] == self.hosts[rank]]
        quiet = time.monotonic() - max(heard, default=time.monotonic())
        if quiet > 4 * PERIOD and self.gone(rank) is None:
            return f"{where}, of whose processes none had a turn to say a word for {quiet:.0f} s"
        return where

    def tell(self) -> None:
        """Say now what there is to say."""
        with suppress(OSError):
            self._mouth.send(b".")

    def close(self) -> None:
        """Leave: the others are told, so that nobody takes it for a death."""
        self._over.set()
        self.tell()
        self._thread.join()
        for doubt in self._doubts:
            doubt.join()
        for line in self._lines.values():
            line.close()
        for _, opened in self._opened:
            opened.close()
        for each in (self._listener, self._ear, self._mouth, self._selector):
            each.close()

    # The thread

    def _serve(self) -> None:
        due, unknown = 0.0, dict[socket.socket, float]()
        while True:
            over = self._over.is_set()
            self._take_up()
            now = time.monotonic()
            if over or now >= due:
                due = now + PERIOD
                self.links.look()
                self._say(over)
            if over:
                break
            for key, _ in self._selector.select(max(0.0, due - time.monotonic())):
                self._ready(key.fileobj, key.data, unknown)
                due = 0.0 if key.data == "ear" else due
            for connection in [c for c, since in unknown.items() if now - since > PROMPT]:
                self._drop(connection, unknown)
        for connection in list(unknown):
            self._drop(connection, unknown)

    def _ready(self, from_: Any, kind: Any, unknown: dict[socket.socket, float]) -> None:
        if kind == "ear":
            with suppress(OSError):
                self._ear.recv(1024)
        elif kind == "listener":
            with suppress(OSError):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                unknown[connection] = time.monotonic()
                self._selector.register(connection, selectors.EVENT_READ, "unknown")
        elif kind == "unknown":
            try:
                rank = heard_key(from_, self._key)
            except (UnknownCaller, OSError):
                self._drop(from_, unknown)
                return
            if rank is not None and rank in self._places:
                self._selector.unregister(from_)
                del unknown[from_]
                self._opened.append((rank, from_))
        else:
            self._hear(kind)

    def _drop(self, connection: socket.socket, unknown: dict[socket.socket, float]) -> None:
        self._selector.unregister(connection)
        connection.close()
        del unknown[connection]

    def _take_up(self) -> None:
        """Connections that were opened become lines, each in the place of an older one."""
        with self._lock:
            opened, self._opened = self._opened, []
        for rank, connection in opened:
            if (old := self._lines.pop(rank, None)) is not None:
                self._selector.unregister(old.connection)
                old.close()
            self._lines[rank] = line = HostLine(connection, rank, self.silence / SHARES[0])
            self._selector.register(connection, selectors.EVENT_READ, line)
            self._said.pop(rank, None)
            self.silent.pop(self.hosts[rank], None)

    def _say(self, over: bool) -> None:
        said = {str(r): self.pages[r].told() for r in self.here}
        gone = [r for r in self.here if r != self.rank and not runs(self.pages[r].pid)]
        still = [r for r in self.here if stopped(self.pages[r].pid)]
        told = {"pages": said, "gone": gone, "stopped": still, "leaves": over}
        text = json.dumps(told, separators=(",", ":")).encode()
        for line in list(self._lines.values()):
            new = self._said.get(line.peer) != text
            with suppress(OSError):  # it broke, which is heard behind what the other end said last
                if line.say(text if new else KNOCK):
                    self._said[line.peer] = text

    def _hear(self, line: HostLine) -> None:
        try:
            messages = line.take()
        except BlockingIOError:
            return
        except (OSError, EOFError, UnknownCaller, ValueError):
            self._broke(line)
            return
        self._heard[line.peer] = line.heard
        for said in messages:
            if not said:
                continue
            there = {r for r, host in enumerate(self.hosts) if host == self.hosts[line.peer]}
            for name, page in said["pages"].items():
                if (rank := int(name)) in there:
                    self.pages[rank].hear(page)
                    if page[3] is not None and self.first_fault is None:
                        self.first_fault = rank
            self.dead |= there & {*said["gone"]}
            self.stopped = self.stopped - there | there & {*said["stopped"]}
            if said["leaves"]:
                self._left.add(line.peer)

    def _broke(self, line: HostLine) -> None:
        self._selector.unregister(line.connection)
        line.close()
        del self._lines[line.peer]
        if line.peer in self._left:
            self.dead.add(line.peer)
            return
        doubt = threading.Thread(target=self._ask, args=[line.peer], name="sbpflow-heartbeat", daemon=True)
        self._doubts = [each for each in self._doubts if each.is_alive()] + [doubt]
        doubt.start()

    def _ask(self, peer: int) -> None:
        """Ask a host whose line broke, until it is there again or the process is known to be gone."""
        host = self.hosts[peer]
        while not self._over.is_set() and peer not in self._lines:
            try:
                connection = self._open(peer)
            except (ConnectionRefusedError, ConnectionResetError):
                self.dead.add(peer)
                return
            except OSError:
                self.silent.setdefault(host, time.monotonic())
            else:
                self.silent.pop(host, None)
                if peer in self._opens:
                    with self._lock:
                        self._opened.append((peer, connection))
                    self.tell()
                    return
                connection.close()
            self._over.wait(1.0)


def partners(rank: int, hosts: Sequence[str]) -> tuple[list[int], list[int]]:
    """The ranks of other hosts that a rank has a line to: those that it opens one to, and those that do.

    Of two hosts the one with more ranks opens a line from each of them, so that nobody is without one.

    >>> [partners(rank, "aab") for rank in range(3)]
    [([2], []), ([2], []), ([], [0, 1])]
    """
    ranks = {host: [r for r, of in enumerate(hosts) if of == host] for host in dict.fromkeys(hosts)}
    mine = ranks.pop(hosts[rank])
    opens, awaits, at = list[int](), list[int](), mine.index(rank)
    for other in ranks.values():
        if (len(mine), mine) > (len(other), other):
            opens.append(other[at % len(other)])
        else:
            awaits += other[at :: len(mine)]
    return opens, awaits


def host_name(host: str) -> str:
    """A host in words: its name without what tells apart two of one name."""
    return host.partition(":")[0] or host


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
