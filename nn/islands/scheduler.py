"""The scheduler of an island: the one order in which all ranks run the programs of all clients.

    a client's line -> its queue -> FairShares -> AHEAD programs sent -> every worker's line, in the same order

A program is settled when it has ended on all ranks: only then does any of them begin the next, which lies there
already. So no two ranks are in different programs, and each knows whether the one before failed anywhere.
"""

import socket
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from .messages import (
    ClientCame,
    ClientGone,
    Hello,
    IslandEnds,
    MessageLine,
    ProgramEnded,
    ProgramSent,
    Settled,
    Welcome,
)

__all__ = ["FairShares", "IslandScheduler"]

AHEAD = 2  # programs that lie at the workers: one that runs, and the next, which costs no way any more


class IslandScheduler:
    """Listens for workers and clients, each of which has a thread here; all that they change is under one lock."""

    def __init__(self, host: str, port: int, key: bytes, ranks: int) -> None:
        self._listener = Listener((host, port), "AF_INET", backlog=128)
        self.address: Any = self._listener.address
        self.complete = threading.Event()  # set when all workers are there
        self._key, self._ranks = key, ranks
        self._over = self._closed = False  # whether no program begins any more, and whether all is over
        self._lock = threading.RLock()
        self._workers: dict[int, MessageLine] = {}
        self._clients: dict[int, MessageLine] = {}
        self._came = 0  # clients so far
        self._shares = FairShares()
        self._sent: deque[ProgramSent] = deque()
        self._reports: list[ProgramEnded] = []
        threading.Thread(target=self._accept, name="sbpflow island", daemon=True).start()

    def close(self) -> None:
        """Hang up on all, and listen no more."""
        with self._lock:
            self._over = self._closed = True
            lines = [*self._workers.values(), *self._clients.values()]
        for line in lines:
            line.close()
        for line in lines:
            line.flush()
        with suppress(OSError):  # whoever accepts is not woken by a close
            socket.create_connection(self.address, timeout=1).close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=[connection], name="sbpflow island", daemon=True).start()

    def _serve(self, connection: "Connection[Any, Any]") -> None:
        """The life of a line; nothing is unpickled before the other end has shown that it has the key."""
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            line = MessageLine(connection)
            hello: Hello = line.take()
        except (AuthenticationError, AssertionError, OSError, EOFError):
            connection.close()
            return
        try:
            if hello.rank is None:
                self.complete.wait()
                self._client(line, hello)
            else:
                self._worker(line, hello.rank)
        finally:
            line.close()

    def _client(self, line: MessageLine, hello: Hello) -> None:
        with self._lock:
            client, self._came = self._came, self._came + 1
            self._clients[client] = line
            self._shares.join(client, hello.share)
            assert hello.code is not None
            self._tell(ClientCame(client, hello.code))
            line.put(Welcome(client, self._ranks))
        try:
            while True:
                message = line.take()
                with self._lock:
                    if isinstance(message, IslandEnds):  # what is in queues is dropped
                        self._over = True
                        self._tell(message)
                    else:
                        self._shares.put(client, message, cost=isinstance(message, ProgramSent))
                        self._send()
        except EOFError:
            with self._lock:
                self._shares.leave(client)
                del self._clients[client]
                self._tell(ClientGone(client))

    def _worker(self, line: MessageLine, rank: int) -> None:
        with self._lock:
            self._workers[rank] = line
            if len(self._workers) == self._ranks:
                self.complete.set()
        try:
            while True:
                report = line.take()
                with self._lock:
                    self._reported(report)
        except EOFError:
            with self._lock:
                lost = not self._over
                self._over = True
                for other in self._workers.values() if lost else ():  # it died: what is under way never ends
                    other.close()

    def _tell(self, message: NamedTuple) -> None:
        for line in self._workers.values():
            line.put(message)

    def _send(self) -> None:
        """Send what is next, as long as not too much lies at the workers."""
        while not self._over and len(self._sent) < AHEAD and (item := self._shares.take()) is not None:
            self._tell(item)
            if isinstance(item, ProgramSent):
                self._sent.append(item)

    def _reported(self, report: ProgramEnded) -> None:
        self._reports.append(report)
        if len(self._reports) < self._ranks:
            return
        reports, self._reports = self._reports, []
        ended = self._sent.popleft()
        failures = [each.failure for each in reports if each.failure is not None]
        failure = min(failures, key=lambda each: (each.of_transport, each.rank), default=None)
        alike = len(failures) == self._ranks and len({(each.of_transport, each.said) for each in failures}) == 1
        self._tell(Settled(failure, alike and failure is not None and not failure.of_transport))
        if ended.client in self._clients:
            value = next((each.value for each in reports if each.value is not None), None)
            self._clients[ended.client].put(ProgramEnded(ended.number, failure, None if failure else value))
        self._send()


@dataclass
class _Queue:
    share: float
    had: float  # programs that it was given, divided by its share
    items: deque[tuple[Any, int]] = field(default_factory=deque)


class FairShares:
    """A queue for each client. Who has had least for its share is next, and among equals who came first.

    One that was idle gets nothing for the time in which it did not ask.

    >>> shares = FairShares()
    >>> shares.join(0, 2.0), shares.join(1, 1.0)
    (None, None)
    >>> for number in range(4): shares.put(0, f"a{number}"), shares.put(1, f"b{number}")
    (None, None)
    (None, None)
    (None, None)
    (None, None)
    >>> " ".join(iter(shares.take, None))
    'a0 b0 a1 a2 b1 a3 b2 b3'
    """

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}
        self._now = 0.0  # of the client that was last served, what it had had before

    def join(self, client: int, share: float) -> None:
        """A client that may put items."""
        self._queues[client] = _Queue(share, self._now)

    def leave(self, client: int) -> None:
        """Drop a client, and all that it has waiting."""
        del self._queues[client]

    def put(self, client: int, item: Any, cost: int = 1) -> None:
        """Enqueue an item behind those of the same client; one that costs nothing counts for nobody's share."""
        queue = self._queues[client]
        if not queue.items:
            queue.had = max(queue.had, self._now)
        queue.items.append((item, cost))

    def take(self) -> Any:
        """The next item, or None where nobody waits."""
        waiting = [queue for queue in self._queues.values() if queue.items]  # in the order in which they came
        if not waiting:
            return None
        queue = min(waiting, key=lambda queue: queue.had)
        item, cost = queue.items.popleft()
        self._now = queue.had
        queue.had += cost / queue.share
        return item
