"""Waits at the store where a run has met: for what another rank writes there, as long as both are there.

    rank 1   is it there?  --  store on host a  <--  rank 3        between two looks: is rank 3 gone?
             the watch: host a is lost, so nobody will answer: end the connection

Torch asks the store without a limit of its own, and a host that is gone closes nothing. So the watch of the process
ends the connection to a lost host, and whoever asks there has an error.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...placement.errors import TransportError
from ...placement.ledger import Ledger
from ...placement.network.connections import end_connections

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["StoreGuard", "await_key"]

ASK = 0.002, 0.05  # seconds between two looks at the store, at first and later: a look that waits would block others
LOOK = 0.5  # seconds between two looks at who is waited for


class StoreGuard:
    """Guards those who are inside of it from a store whose host is gone. Several threads may be."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.place = ledger, _place(ledger.store)
        self._asking, self._lock = 0, threading.Lock()

    def __enter__(self) -> "StoreGuard":
        with self._lock:
            self._asking += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._asking -= 1

    def lost(self) -> str | None:
        """Why the store does not answer any more, if its host is lost."""
        beats = self.ledger.heartbeats
        return None if beats is None or self.place is None else beats.lost_at(self.place[0])

    def look(self) -> None:
        """End the connection to the store where somebody waits for what cannot come. The watch calls it."""
        if self._asking and self.place is not None and self.lost():
            end_connections(*self.place)


def await_key(meeting: "Store", key: str, limit: float, gone: Callable[[], str | None]) -> str | None:
    """The value of a key once it is there, None if that takes more than `limit` seconds; an error with what `gone` says
    of who was to write it."""
    began, pause = time.monotonic(), ASK[0]
    look = began + LOOK
    while not meeting.check([key]):
        now = time.monotonic()
        if now > began + limit:
            return None
        if now > look:
            look = now + LOOK
            if (said := gone()) is not None and not meeting.check([key]):
                raise TransportError(said)
        time.sleep(pause)
        pause = min(pause * 1.5, ASK[1])
    return meeting.get(key).decode()


def _place(meeting: "Store") -> tuple[str, int] | None:
    """Address and port of the store, where it is one that processes connect to."""
    while hasattr(meeting, "underlying_store"):
        meeting = meeting.underlying_store
    host, port = getattr(meeting, "host", None), getattr(meeting, "port", None)
    with suppress(OSError):
        if host and port:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
    return None
