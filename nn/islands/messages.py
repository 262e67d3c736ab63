"""Messages between the clients, the scheduler and the workers of an island, and the line by which they go.

Of each line's messages the order is kept. Who puts one never waits for who is to read it: that may be a rank that
computes, or a process that is stopped.
"""

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

__all__ = [
    "ClientCame", "ClientCode", "ClientGone", "Hello", "IslandEnds", "MessageLine", "ProgramEnded", "ProgramFailure",
    "ProgramSent", "ResultFreed", "Settled", "Welcome",
]  # fmt: skip


class ClientCode(NamedTuple):
    """The places where workers find the functions of a client, and the seed of its numbers of Python and NumPy."""

    path: tuple[str, ...]
    main: tuple[str, str] | None  # the name or file of its `__main__`, and the digest of it; None if it has no file
    seed: int


class ProgramFailure(NamedTuple):
    """An error on a rank: its traceback as text, and itself where it can be sent."""

    rank: int
    said: str
    text: str
    error: bytes | None
    of_transport: bool
    program: str


class Hello(NamedTuple):
    """The first message of a line: a worker says its rank, a client how large its share is."""

    rank: int | None
    share: float = 1.0
    code: ClientCode | None = None


class Welcome(NamedTuple):
    """The answer to a client: its number, and how many ranks there are."""

    client: int
    ranks: int


class ProgramSent(NamedTuple):
    """A program of a client, under the client's own number; `home` if its value is to come home.

    `takes` are the numbers of results among its arguments.
    """

    client: int
    number: int
    name: str
    pickled: bytes
    takes: tuple[int, ...]
    file: tuple[str, str] | None  # the module of the function, and the digest of its file
    home: bool


class ResultFreed(NamedTuple):
    """A result that nobody has a handle of any more."""

    client: int
    number: int


class ClientCame(NamedTuple):
    """To workers: a client is there."""

    client: int
    code: ClientCode


class ClientGone(NamedTuple):
    """To workers: a client has hung up or died, and all that it had is free."""

    client: int


class Settled(NamedTuple):
    """To workers: a program has ended on all ranks. It failed if it did on one; `alike` if on all, of the same."""

    failure: ProgramFailure | None
    alike: bool


class ProgramEnded(NamedTuple):
    """A program has ended: on a rank or, to its client, on all. A value that is to come home is the first rank's."""

    number: int
    failure: ProgramFailure | None
    value: bytes | None


class IslandEnds(NamedTuple):
    """The island is to end: from a client to the scheduler, and from there to the workers."""


class MessageLine:
    """One end of a connection. A thread sends what is put, in that order; putting is allowed in finalizers too."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        with socket.socket(fileno=os.dup(connection.fileno())) as same:  # small messages wait for no answer to others
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._left: SimpleQueue[Any] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="sbpflow island line", daemon=True)
        self._sender.start()

    def put(self, message: NamedTuple) -> None:
        """Have a message sent; nothing happens where the other end is gone, which `take` tells."""
        self._left.put(message)

    def take(self) -> Any:
        """The next message; EOFError when the other end, or this one, is closed."""
        try:
            return self._connection.recv()
        except OSError:
            raise EOFError("the line is closed") from None

    def close(self) -> None:
        """Send what was put, then hang up, which also ends a `take` that waits."""
        self._left.put(None)

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until it has hung up, but not for ever: the other end may not read."""
        self._sender.join(seconds)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._left.get()) is not None:
                self._connection.send(message)
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
