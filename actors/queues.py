"""The queues of a crew, and when one does another's waiting."""

import threading
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from .desk import Desk, Firing
from .plan import Work
from .protocol import Wiring

__all__ = ["Begins", "Begun", "Queue", "lend", "needed"]


class Begun(NamedTuple):
    """A firing whose work has begun, and since when."""

    firing: Firing
    start: float


class Queue:
    """A queue and the thread that drives it. `parked`: nothing to do until its bell is rung."""

    def __init__(self, at: int, name: str, order: tuple[int, ...] | None) -> None:
        self.at, self.name, self.order = at, name, order
        self.turn = 0  # how much of the order is done
        self.parked = True
        self.begun: Begun | None = None  # by the thread that made it ready
        self.lent: tuple[Queue, ...] = ()  # queues whose waiting this one does
        self.lender: Queue | None = None
        self.bell = threading.Lock()
        self.bell.acquire()
        self.thread: threading.Thread | None = None


Begins: TypeAlias = list[tuple[Queue, Firing, int]]  # firings to begin, with how many more have a free slot


def lend(home: Queue, queues: Sequence[Queue], wiring: Wiring, work: Sequence[Work]) -> None:
    """Lend a queue that goes by an order those that do nothing but receive for it alone: they need no thread then."""
    if home.order is None:
        return
    found = []
    for queue in queues:
        mine = [at for at, actor in enumerate(wiring.network.actors) if actor.queue == queue.name]
        readers = {wiring.network.actors[to].queue for at in mine for to, _ in wiring.consumer[at]}
        if readers <= {home.name} and all(getattr(work[at], "arrives", False) for at in mine):
            queue.lender = home
            found.append(queue)
    home.lent = tuple(found)


def needed(queue: Queue, queues: Sequence[Queue], desk: Desk) -> Queue | None:
    """A lent queue with an arrival under way that the next firing in order needs, or after the last one any."""
    assert queue.order is not None
    if queue.turn == len(queue.order):
        return next((other for other in queue.lent if other.begun is not None), None)
    at = queue.order[queue.turn]
    wired, state = desk.wiring.actors[at], desk.states[at]
    for port, slots, every, low in wired.takes[wired.case(state.fired)]:
        by, _ = desk.wiring.producer[at][port]
        if every > 1 and wired.turn(False, port, state.fired) % every:
            continue  # it was taken before
        if by >= 0 and state.have[port] < slots + low and not state.ended[port]:
            other = queues[desk.queue[by]]
            if other.lender is queue and other.begun is not None:
                return other
    return None
