"""The watch over a step: its first error, and whether anything goes on."""

import sys
import threading
from time import monotonic
from typing import Protocol

from ..placement.errors import ScheduleError, TransportError
from .plan import Plan

__all__ = ["Doing", "Watch", "where"]


class Doing(Protocol):
    """Who makes a step."""

    @property
    def fired(self) -> int:
        """How often something was done so far."""

    def at_work(self) -> str:
        """The queues that are at something now."""

    def describe(self) -> str:
        """Who waits for whom."""


class Watch:
    """What a guard knows of a step."""

    def __init__(self, plan: Plan, doing: Doing) -> None:
        self.plan, self.guard, self.doing = plan, plan.guard, doing
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.failed = self.progressed = 0.0
        self.seen = 0

    def begin(self) -> None:
        self.error, self.seen, self.progressed = None, 0, monotonic()
        if self.guard is not None:
            self.guard.enter(self)

    def end(self) -> None:
        if self.guard is not None:
            self.guard.leave()

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
        elif self.error is None and now - self.progressed > self.plan.timeout:
            self.report()
            error = ScheduleError if self.guard is None else TransportError
            self.fail(
                error(
                    f"{self.plan.name} made no progress for {self.plan.timeout:g} s; at work: {self.doing.at_work()}\n"
                    "  stderr tells who waits for whom; where firings do take that long, give a longer timeout="
                )
            )

    def report(self) -> None:
        """Print who waits for whom."""
        print(f"{self.plan.name}: who waits for whom\n{self.doing.describe()}", file=sys.stderr, flush=True)


def where(actor: str, case: str, label: int) -> str:
    """A firing, in words."""
    return f"{actor}{f' ({case})' if case else ''}, micro-batch {label}"
