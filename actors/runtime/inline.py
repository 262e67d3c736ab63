"""Inline steps: the calling thread makes them alone, in a static order."""

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

from ...placement.errors import ScheduleError
from ..protocol.feasibility import waits
from ..protocol.state import Firing, Slot
from .channel import Receive, Send
from .job import Job, Raw, check_first, check_given
from .progress import Progress, at_line, waits_inside, where
from .static_order import StaticOrder

__all__ = ["InlineSteps"]

LARGE = 1 << 18  # bytes; what a register sends may hold no more until somebody must wait for it
GRACE = 10.0  # seconds in which the thread must stop


class InlineSteps:
    """Steps of one queue. A thread beside it only lets large sends go, and is made when there are any."""

    def __init__(self, job: Job) -> None:
        self.job, self.order = job, StaticOrder(job)
        self.watch = Progress(self, job.name, job.guard, job.timeout)
        self.fired = 0
        self.caller: threading.Thread | None = None  # makes a step
        self.large: SimpleQueue[Send | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def run(self, record: bool) -> list[Raw]:
        """One step, to the end or to the first error."""
        watch, order = self.watch, self.order
        self.fired, self.caller = 0, threading.current_thread()
        cells: list[Any] = [None] * len(order.readers)
        for register, values in self.job.initial.items():
            self.fill(cells, register, values())
        for link in order.links:
            link.start()
        ran: list[Raw] = []
        watch.begin()
        try:
            try:
                self.follow(cells, ran if record else None)
                if watch.error is None and not order.desk.ended:
                    watch.fail(ScheduleError(f"{self.job.name} cannot go on\n{self.describe()}"))
            except BaseException as error:  # whatever it is, the step must end everywhere
                self.fail(error)
        finally:
            watch.end()
            cells.clear()
        if watch.error is not None:
            raise watch.error
        return ran

    def fill(self, cells: list[Any], register: str, values: Sequence[Any]) -> None:
        """Put values in the slots that are filled at the start."""
        known = self.order.initial.get(register, [])
        check_first(register, values, len(known))
        for cell, value in zip(known, values, strict=True):
            cells[cell] = value

    def follow(self, cells: list[Any], ran: list[Raw] | None) -> None:
        """Do what the order says."""
        watch = self.watch
        for receive, fired, room in self.order.first:
            receive.post(fired, room)
        start = 0.0
        for n, (firing, work, link, width, fills, sends, receives, drops) in enumerate(self.order.entries):
            if watch.error is not None:
                return
            self.fired = n
            at, case, label, turn, held, more = firing
            if link is not None:
                value = link.wait(label)
                for _, _, cell in fills:
                    cells[cell] = value
                value = None
                if ran is not None:
                    ran.append((at, case, label, *link.span(label), ()))
            else:
                if held:
                    held = tuple([tuple([_new(Slot, (k, cells[cell])) for k, cell in slots]) for slots in held])
                if ran is not None:
                    start = perf_counter()
                values = work(_new(Firing, (at, case, label, turn, held, more)))
                if ran is not None:
                    ran.append((at, case, label, start, perf_counter(), more))
                held = ()
                if values is not None:
                    check_given(values, width)
                    for give, one, cell in fills:
                        value = values[give]
                        cells[cell] = value if one < 0 or value is None else value[one]
                    value = values = None
            for send, label, cell in sends:
                send.post(label, cells[cell])
                if send.put - send.gone > LARGE:
                    self.let_go(send)
            for receive, fired, room in receives:
                receive.post(fired, room)
            for cell in drops:
                cells[cell] = None
        self.fired = len(self.order.entries)

    def let_go(self, send: Send) -> None:
        """Have the thread wait for what is under way."""
        if self.thread is None:
            name = f"sbpflow {self.job.name}: sends"
            self.thread = threading.Thread(target=self.settle, name=name, daemon=True)
            self.thread.start()
        self.large.put(send)

    def settle(self) -> None:
        """The life of the thread."""
        while (send := self.large.get()) is not None:
            try:
                for label in tuple(send.posted):
                    send.wait(label)
            except Exception as error:
                self.watch.fail(error)

    def fail(self, error: BaseException) -> None:
        entries = self.order.entries
        if self.fired == len(entries):
            self.watch.fail(error)
            return
        firing = entries[self.fired].firing
        actor = self.job.network.actors[firing.actor]
        self.watch.fail(error, where(actor.name, actor.cases[firing.case], firing), actor.queue)

    def at_work(self) -> str:
        entries = self.order.entries[self.fired : self.fired + 1]
        actors = self.job.network.actors
        return ", ".join(actors[e.firing.actor].queue + at_line(self.caller) for e in entries) or "nobody"

    def idles(self) -> bool:
        now = self.order.entries[self.fired : self.fired + 1]
        return any(entry.link is not None for entry in now) or waits_inside(self.caller)

    def describe(self) -> str:
        travel = [work.travel if isinstance(work, Send | Receive) else None for work in self.order.work]
        return str(waits(StaticOrder(self.job, self.fired).desk, travel))

    def close(self) -> None:
        """End the thread; one that still waits is left to end by itself."""
        thread, self.thread = self.thread, None
        if thread is not None:
            self.large.put(None)
            thread.join(GRACE if self.watch.error is None else 0.0)


_new = tuple.__new__  # half as long as Firing(...)
