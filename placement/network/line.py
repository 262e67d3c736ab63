"""A line between processes of two hosts, on which each says now and then what its host is at.

It begins with the run's key and the rank of who opens it. The kernels of both ends watch it: what was sent and is not
acknowledged in time, or a question of the kernel that the other kernel does not answer, ends it with an error. A
process that is stopped, or that computes for long without a thread of Python's getting its turn, does not: its kernel
answers. A process that ends closes it.
"""

import hmac
import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

from .interface import family_of

__all__ = ["HostLine", "UnknownCaller", "heard_key", "listen", "open_line"]

LENGTH = struct.Struct("!I")
LONGEST = 1 << 20  # bytes of a message
BLOCK = 1 << 16
HELLO = struct.Struct("!32sI")
QUIET = 5.0  # seconds without a word, from which on little is sent either, since it may lie there unread
KNOCK = b"{}"  # a word that says nothing, but that its process has a turn


class UnknownCaller(Exception):
    """A caller has another key than the run, or says what nobody says."""


class HostLine:
    """One end. Nothing here waits: what cannot be sent now is sent later, and what has come is taken."""

    def __init__(self, connection: socket.socket, peer: int, within: float) -> None:
        self.connection, self.peer = connection, peer
        connection.setblocking(False)
        watch(connection, within)
        self.heard = self.said = time.monotonic()
        self._coming, self._going = bytearray(), bytearray()

    def say(self, text: bytes) -> bool:
        """Send a message, unless an earlier one is still on its way or nobody reads; whether it was taken.

        Where nobody does there is a knock now and then: both ends may have been without a turn at once, and each would
        wait for a word of the other.
        """
        now = time.monotonic()
        takes = not self._going and now - self.heard < QUIET
        if takes or (not self._going and now - self.said > QUIET):
            text = text if takes else KNOCK
            self._going += LENGTH.pack(len(text)) + text
            self.said = now
        try:
            while self._going:
                del self._going[: self.connection.send(self._going)]
        except BlockingIOError:
            pass
        return takes

    def take(self) -> list[Any]:
        """The messages that have come; EOFError where the other end was closed."""
        found = []
        data = self.connection.recv(BLOCK)
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._coming += data
        while len(self._coming) >= LENGTH.size:
            size = LENGTH.unpack_from(self._coming)[0]
            if size > LONGEST:
                raise UnknownCaller
            if len(self._coming) < LENGTH.size + size:
                break
            found.append(json.loads(self._coming[LENGTH.size : LENGTH.size + size]))
            del self._coming[: LENGTH.size + size]
        return found

    def close(self) -> None:
        """Close it when all is read, because a kernel takes back what was said last where something was not."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(BLOCK):
                pass
        self.connection.close()


def watch(connection: socket.socket, within: float) -> None:
    """Have the kernel end a connection whose other host is silent for so many seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", max(2, round(within) - 1))):
        if hasattr(socket, name):  # Linux has all, others some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(within * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def listen(address: str) -> socket.socket:
    """A socket that lines are opened to, at a free port of an address of this host."""
    made = socket.socket(family_of(address), socket.SOCK_STREAM)
    made.bind((address, 0))
    made.listen(4096)
    made.setblocking(False)
    return made


def open_line(address: tuple[str, int], key: bytes, rank: int, seconds: float) -> socket.socket:
    """A connection to a process, which hears who asks."""
    connection = socket.create_connection(address, seconds)
    connection.sendall(HELLO.pack(key, rank))
    return connection


def heard_key(connection: socket.socket, key: bytes) -> int | None:
    """The rank that opened a connection; None as long as it has not said all, UnknownCaller if it has another key."""
    said = connection.recv(HELLO.size, socket.MSG_PEEK)
    if said and len(said) < HELLO.size and hmac.compare_digest(said[:32], key[: len(said)]):
        return None
    if len(said) < HELLO.size or not hmac.compare_digest(said[:32], key):
        raise UnknownCaller
    connection.recv(HELLO.size)
    rank: int = HELLO.unpack(said)[1]
    return rank
