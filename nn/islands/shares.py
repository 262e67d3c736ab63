"""Shares: whose program is next, where several clients wait."""

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairShares"]

Item = TypeVar("Item")


@dataclass
class _Queue(Generic[Item]):
    share: float
    had: float  # programs that it was given, divided by its share
    items: deque[tuple[Item, int]] = field(default_factory=deque)


class FairShares(Generic[Item]):
    """A queue for each client. Who has had least for its share is next, and among equals who came first.

    One that was idle gets nothing for the time in which it did not ask.

    >>> shares = FairShares[str]()
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
        self._queues: dict[int, _Queue[Item]] = {}
        self._now = 0.0  # of the client that was last served, what it had had before

    def join(self, client: int, share: float) -> None:
        """A client that may put items."""
        self._queues[client] = _Queue(share, self._now)

    def leave(self, client: int) -> None:
        """Drop a client, and all that it has waiting."""
        self._queues.pop(client, None)

    def put(self, client: int, item: Item, cost: int = 1) -> None:
        """Enqueue an item behind those of the same client; one that costs nothing counts for nobody's share."""
        queue = self._queues[client]
        if not queue.items:
            queue.had = max(queue.had, self._now)
        queue.items.append((item, cost))

    def take(self) -> Item | None:
        """The next item, or None where nobody waits."""
        waiting = [client for client, queue in self._queues.items() if queue.items]
        if not waiting:
            return None
        queue = self._queues[min(waiting, key=lambda client: (self._queues[client].had, client))]
        item, cost = queue.items.popleft()
        self._now = queue.had
        queue.had += cost / queue.share
        return item
