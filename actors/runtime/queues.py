"""The queues of threaded steps, and what a thread does for others between two firings."""

import threading
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Errands", "Queue"]


class Queue:
    """A queue and the thread that drives it. `parked`: nothing to do until its bell is rung."""

    def __init__(self, at: int, name: str, order: tuple[int, ...] | None) -> None:
        self.at, self.name, self.order = at, name, order
        self.turn = 0  # how much of the order is done
        self.parked = True
        self.bell = threading.Lock()
        self.bell.acquire()
        self.thread: threading.Thread | None = None


@dataclass(slots=True)
class Errands:
    """Errands of a thread that has let go of the lock: first messages, then the bells of those that wait.

    A post is of an actor; a send has the label and the value, a receive how many came and how many may.
    """

    posts: list[tuple[int, int, Any]] = field(default_factory=list)
    bells: list[Queue] = field(default_factory=list)
