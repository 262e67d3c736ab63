"""The watch over a step: its first error, and whether anything goes on.

Whoever looks is no thread of the step, since any of these may be the stuck one: it is the guard's, where a step goes on
in other processes, and else one thread of this process for all its steps.
"""

import sys
import threading
from time import monotonic
from typing import Protocol

from ...boxing.exchange.transport import waiting
from ...boxing.exchange.watch import grace
from ...boxing.record import user_line
from ...placement.errors import ScheduleError, TransportError
from ...placement.world import at_close, world
from ..protocol.state import Firing

__all__ = ["Dead", "Doing", "Guard", "Progress", "at_line", "waits_inside", "where"]

PERIOD = 1.0  # seconds between looks, at most


class Dead(TransportError):
    """Nothing goes on, and a rank is dead."""


class Doing(Protocol):
    """The maker of a step: inline, or threads."""

    @property
    def fired(self) -> int:
        """How often something was done so far."""

    def at_work(self) -> str:
        """The queues that are at something now."""

    def idles(self) -> bool:
        """Whether all that is at something waits for another process."""

    def describe(self) -> str:
        """All waits as text: who waits for whom."""


class Guard(Protocol):
    """The guard of a step whose network goes on in other processes."""

    def enter(self, watch: "Progress") -> None:
        """A step begins. Refuses where an earlier one failed; may call the watch's `fail`, `look` and `report`."""

    def leave(self) -> None:
        """The step is over."""

    def dead(self) -> str | None:
        """How a rank went away, such as "rank 2 died", if one did."""

    def tell(self, what: str, error: BaseException) -> BaseException:
        """Have all processes give up, end the waits of this one, and return the error to raise here."""


class Progress:
    """The progress of a step, as a guard knows it. `patience`: seconds without progress; None: those of flow.init."""

    def __init__(self, doing: Doing, name: str, guard: Guard | None, patience: float | None) -> None:
        self.doing, self.name, self.guard, self.patience = doing, name, guard, patience
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.failed = self.progressed = self.timeout = 0.0
        self.seen = 0
        self.told = False

    def begin(self) -> None:
        self.error, self.seen, self.told, self.progressed = None, 0, False, monotonic()
        self.timeout = world().timeout if self.patience is None else self.patience
        if self.guard is not None:
            self.guard.enter(self)
        else:
            _watcher.enter(self)

    def end(self) -> None:
        if self.guard is not None:
            self.guard.leave()
        else:
            _watcher.leave(self)

    def fail(self, error: BaseException, where: str = "", queue: str = "", *, told: bool = False) -> None:
        """End the step with an error, the first that comes. `told`: the other processes know."""
        with self.lock:
            if self.error is not None:
                return
            self.error, self.failed = error, monotonic()
            if where:
                error.add_note(f"in actor {where}, on queue {queue}")
        if self.guard is not None and not told:
            self.error = self.guard.tell(where, error)

    def look(self) -> None:
        """See that something goes on; where nothing does, give up."""
        now, fired = monotonic(), self.doing.fired
        if fired != self.seen:
            self.seen, self.progressed = fired, now
        elif self.error is None and now - self.progressed > self.timeout:
            if self.doing.idles() and now - self.progressed < self.timeout + grace(self.timeout):
                return
            said = f"{self.name} made no progress for {self.timeout:g} s; at work: {self.doing.at_work()}"
            self.report(said)
            dead = self.guard.dead() if self.guard is not None else None
            if dead is not None:
                self.fail(Dead(f"{dead}\n  noticed since {said}\n  start the processes anew"))
                return
            error = ScheduleError if self.guard is None else TransportError
            fix = "where firings do take that long, give flow.init(timeout=) more seconds"
            self.fail(error(f"{said}\n  stderr tells who waits for whom; {fix}"))

    def report(self, said: str = "") -> None:
        """Print who waits for whom, once a step."""
        with self.lock:
            if self.told:
                return
            self.told = True
        rank = world().rank
        here = self.name if rank is None else f"rank {rank}, {self.name}"
        lines = [*([said] if said else []), f"{here}: who waits for whom", self.doing.describe()]
        print("\n".join(lines), file=sys.stderr, flush=True)


class Watcher:
    """The thread that looks at the steps of this process that no guard looks at. It is made with the first of them."""

    def __init__(self) -> None:
        self.steps: set[Progress] = set()
        self.lock = threading.Lock()  # held by who looks: no step ends meanwhile
        self.sooner, self.over = threading.Event(), False
        self.period = PERIOD
        self.thread: threading.Thread | None = None

    def enter(self, watch: Progress) -> None:
        with self.lock:
            if self.thread is None or not self.thread.is_alive():  # a fork has none of its parent's threads
                self.over, self.period = False, PERIOD
                self.steps.clear()
                self.thread = threading.Thread(target=self.serve, name="sbpflow watcher", daemon=True)
                self.thread.start()
                at_close(self.close)
            self.steps.add(watch)
            if watch.timeout / 4 < self.period:
                self.period = watch.timeout / 4
                self.sooner.set()

    def leave(self, watch: Progress) -> None:
        with self.lock:
            self.steps.discard(watch)

    def serve(self) -> None:
        """The life of the thread."""
        while not self.over:
            self.sooner.wait(self.period)
            self.sooner.clear()
            self.look()

    def look(self) -> None:
        """Look at all steps once; a function of its own, so that the thread holds none of them while it waits."""
        with self.lock:
            for watch in self.steps:
                watch.look()
            self.period = min([PERIOD, *(watch.timeout / 4 for watch in self.steps)])

    def close(self) -> None:
        self.over = True
        self.sooner.set()
        if self.thread is not None:
            self.thread.join()


_watcher = Watcher()


def waits_inside(thread: threading.Thread | None) -> bool:
    """Whether a thread waits for another process in the midst of a firing: in a move, or until a value is taken."""
    return thread is not None and thread.ident in waiting


def at_line(thread: threading.Thread | None) -> str:
    """The line of the user's code that a thread is in, in words; empty where it is in none."""
    frame = sys._current_frames().get((thread and thread.ident) or 0)
    line = user_line(frame) if frame is not None else ""
    return "" if not line or line.startswith(threading.__file__) else f" at {line}"


def where(actor: str, case: str, firing: Firing) -> str:
    """A firing, in words."""
    labels = " and ".join(map(str, (firing.label, *firing.more)))
    return f"{actor}{f' ({case})' if case else ''}, micro-batch{'es' * bool(firing.more)} {labels}"
