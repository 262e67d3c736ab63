"""Threaded steps: a thread for each queue, and the step that they are at.

    one lock    guards the desk; a firing takes it once, to end what was done and to begin what comes next
    bells       a queue with nothing ready is parked and sleeps on its own; who makes something ready rings it
    the end     all queues are parked: either every actor has ended, or nothing can go on

What travels to other processes is posted by the thread that filled or freed its slot, so that it waits for no thread to
wake up; the firing of its actor is the wait for it.
"""

import threading
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Any

import torch

from ...placement.errors import ScheduleError
from ..protocol.feasibility import waits
from ..protocol.protocol import Event, Message, Wiring
from ..protocol.state import Desk, Firing, Slot
from .channel import Receive, Send
from .job import Job, Raw, check_first, check_given
from .progress import Progress, at_line, waits_inside, where
from .queues import Errands, Queue

__all__ = ["ThreadedSteps"]

PATIENCE = 1.0  # seconds between looks at whether the step failed
GRACE = 10.0  # seconds in which a queue must stop after an error


class ThreadedSteps:
    """Steps of several queues: threads for all of them but one, which the calling thread drives."""

    def __init__(self, job: Job) -> None:
        network = job.network
        self.job, self.watch = job, Progress(self, job.name, job.guard, job.timeout)
        self.wiring = wiring = Wiring(network)
        self.work = [job.work[actor.name] for actor in network.actors]
        self.sends = [w if isinstance(w, Send) else None for w in self.work]
        self.receives = [w if isinstance(w, Receive) else None for w in self.work]
        self.travel = [send or receive for send, receive in zip(self.sends, self.receives, strict=True)]
        self.outs = [
            [(g, (give := w.actor.gives[g]).every, network.register(give.register).initial) for g in w.give]
            for w in wiring.actors
        ]  # of every out edge: the give, and how its slots are numbered
        orders = {queue: tuple(wiring.number[name] for name in names) for queue, names in job.order.items()}
        self.queues = [Queue(at, name, orders.get(name)) for at, name in enumerate(network.queues)]
        self.home = self.queues[network.queues.index(job.here) if job.here else 0] if self.queues else None
        self.lock = threading.Lock()
        self.closed, self.grad = False, True
        self.over, self.busy, self.fired = True, 0, 0  # `busy` counts queues that are not parked
        self.ran: list[Raw] | None = None

    def run(self, record: bool) -> list[Raw]:
        """One step, to the end or to the first error."""
        home = self.home
        if home is None:
            return []
        if home.thread is None:
            self.hire(home)
        self.desk = Desk(self.wiring)
        for register, values in self.job.initial.items():
            self.fill(register, values())
        for queue in self.queues:
            queue.turn = 0
        for link in self.travel:
            if link is not None:
                link.start()
        self.ran = [] if record else None
        self.over, self.busy, self.fired = False, 1, 0
        self.grad = torch.is_grad_enabled()  # whatever the calling thread does, all do
        home.parked = False
        watch = self.watch
        watch.begin()
        try:
            try:
                self.step(home)
                if watch.error is None and not self.desk.ended:
                    watch.fail(ScheduleError(f"{self.job.name} cannot go on\n{self.describe()}"))
            except BaseException as error:  # from the keyboard
                watch.fail(error)
            if watch.error is not None:
                self.settle(home)
        finally:
            watch.end()
            del self.desk  # and with it every value
        ran, self.ran = self.ran, None
        if watch.error is not None:
            raise watch.error
        return ran or []

    def fill(self, register: str, values: Sequence[Any]) -> None:
        """Put values in the slots that are filled at the start."""
        known = self.wiring.network.register(register)
        check_first(register, values, known.initial)
        for at, actor in enumerate(self.wiring.network.actors):
            for port, take in enumerate(actor.takes):
                if take.register == register:
                    slots = self.desk.slots[at][port]
                    slots.clear()
                    slots.extend([Slot(n, value) for n, value in enumerate(values)])

    def hire(self, home: Queue) -> None:
        for queue in self.queues:
            if queue is not home:
                called = f"sbpflow {self.job.name}: {queue.name}"
                queue.thread = threading.Thread(target=self.serve, args=(queue,), name=called, daemon=True)
                queue.thread.start()
        home.thread = threading.current_thread()

    def serve(self, queue: Queue) -> None:
        """The life of a thread."""
        while True:
            queue.bell.acquire()
            if self.closed:
                return
            torch.set_grad_enabled(self.grad)
            self.drive(queue)

    def step(self, home: Queue) -> None:
        """The calling thread's part: drive its queue until all is over."""
        errands = Errands()
        with self.lock:
            for at, receive in enumerate(self.receives):
                if receive is not None:
                    self.ask(at, errands)
            for queue in self.queues:
                self.wake(queue, errands)
        self.run_errands(errands)
        over = self.drive(home)
        while not over and self.watch.error is None:
            if home.bell.acquire(timeout=PATIENCE):
                over = self.over or self.drive(home)

    def settle(self, home: Queue) -> None:
        """After an error, wait until all queues have stopped."""
        with self.lock:
            if not home.parked:
                self.park(home)
        while not self.over:
            home.bell.acquire(timeout=PATIENCE)
            if monotonic() - self.watch.failed > GRACE and self.watch.error is not None:
                self.watch.error.add_note(f"after that {self.at_work()} did not stop within {GRACE:g} s")
                return

    def drive(self, queue: Queue) -> bool:
        """Run what is ready until nothing is; whether that was the end of the step."""
        lock, work, record = self.lock, self.work, self.ran is not None
        errands = Errands()
        firing: Firing | None = None
        values: Sequence[Any] | None = None
        start, over = 0.0, False
        try:
            while True:
                end = perf_counter() if record else 0.0
                with lock:
                    if firing is not None:
                        self.finish(firing, values, errands)
                        if record:
                            self.note(firing, start, end)
                        firing = values = None  # what it held may be let go by others from now on
                    at = self.pick(queue)
                    if at is not None:
                        firing = self.desk.fire(at)
                    elif not errands.posts and not errands.bells:
                        over = self.park(queue)
                if errands.posts or errands.bells:
                    self.run_errands(errands)
                elif firing is None:
                    return over
                if firing is not None:
                    start = perf_counter() if record else 0.0
                    values = work[firing.actor](firing)
        except BaseException as error:  # whatever it is, the step must end on every queue
            self.fail(error, firing)
            firing = values = None
            with lock:
                for waiting in errands.bells:
                    self.park(waiting)
                return self.over if queue.parked else self.park(queue)

    def pick(self, queue: Queue) -> int | None:
        """The actor that the queue runs now."""
        ready = self.desk.ready[queue.at]
        if not ready or self.watch.error is not None:
            return None
        if queue.order is None:
            return self.desk.next(queue.at)
        at = queue.order[queue.turn] if queue.turn < len(queue.order) else None
        if at in ready:
            queue.turn += 1
            return at
        return None

    def finish(self, firing: Firing, values: Sequence[Any] | None, errands: Errands) -> None:
        """End a firing: its values go to where they are read, and what it read is let go."""
        at = firing.actor
        gives = self.wiring.actors[at].actor.gives
        if values is None:
            values = (None,) * len(gives)
        else:
            check_given(values, len(gives))
        self.fired += 1
        self.post(at, values, self.desk.done(at), errands)
        if self.receives[at] is not None:
            self.ask(at, errands)

    def ask(self, at: int, errands: Errands) -> None:
        """Have receives posted for the slots that are free."""
        state = self.desk.states[at]
        errands.posts.append((at, state.fired, min(state.credits, default=0) + (state.phase == "running")))

    def post(self, at: int, values: Sequence[Any], messages: tuple[Message, ...], errands: Errands) -> None:
        """Carry messages, and wake the queues that they make something ready on."""
        desk, wiring = self.desk, self.wiring
        freed: list[int] = []
        for kind, port, slots in messages:
            if kind == "freed":
                to, out = wiring.producer[at][port]
                if to < 0:
                    continue
                event = Event("freed", out, slots)
                if self.receives[to] is not None:
                    freed.append(to)
            else:
                to, take = wiring.consumer[at][port]
                if kind == "end":
                    event = Event("end", take)
                else:
                    give, every, first = self.outs[at][port]
                    first += desk.label(at, port) // every * slots
                    value = values[give]
                    if slots == 1:
                        several = [Slot(first, value)]
                    else:
                        several = [Slot(first + n, None if value is None else value[n]) for n in range(slots)]
                    desk.slots[to][take].extend(several)
                    if self.sends[to] is not None:
                        errands.posts += [(to, *slot) for slot in several]
                    event = Event("filled", take, slots)
            more = desk.tell(to, event)
            if more:
                self.post(to, (), more, errands)
            queue = self.queues[desk.queue[to]]
            if queue.parked:
                self.wake(queue, errands)
        for to in freed:
            self.ask(to, errands)

    def wake(self, queue: Queue, errands: Errands) -> None:
        """Ring the bell of a queue that has something ready; where that travels, once it is posted."""
        ready = self.desk.ready[queue.at]
        if not queue.parked or not ready or self.watch.error is not None:
            return
        if queue.order is not None and (queue.turn == len(queue.order) or queue.order[queue.turn] not in ready):
            return
        queue.parked = False
        self.busy += 1
        if self.travel[next(iter(ready))] is None:
            queue.bell.release()
        else:
            errands.bells.append(queue)

    def run_errands(self, errands: Errands) -> None:
        """Post what travels, and then ring the bells of those that wait for it."""
        posts, errands.posts = errands.posts, []
        for at, number, given in posts:
            link = self.travel[at]
            assert link is not None
            try:
                if self.watch.error is None:
                    link.post(number, given)
            except Exception as error:
                self.fail(error, Firing(at, 0, number, number, ()))
        while errands.bells:
            errands.bells.pop().bell.release()

    def park(self, queue: Queue) -> bool:
        """Nothing to do here; whether the step is over with that. The last to park tells the calling thread."""
        queue.parked = True
        self.busy -= 1
        if self.busy:
            return False
        self.over = True
        if queue is not self.home and self.home is not None:
            self.home.parked = False
            self.home.bell.release()
        return True

    def note(self, firing: Firing, start: float, end: float) -> None:
        assert self.ran is not None
        link = self.travel[firing.actor]
        if link is not None:
            start, end = link.span(firing.label)
        self.ran.append((firing.actor, firing.case, firing.label, start, end, firing.more))

    def fail(self, error: BaseException, firing: Firing | None) -> None:
        if firing is None:
            self.watch.fail(error)
        else:
            actor = self.wiring.actors[firing.actor].actor
            self.watch.fail(error, where(actor.name, actor.cases[firing.case], firing), actor.queue)

    def at_work(self) -> str:
        busy = [queue for queue in self.queues if not queue.parked]
        return ", ".join(q.name + at_line(q.thread) for q in busy) or "nobody"

    def idles(self) -> bool:
        links = {self.desk.queue[at] for at, link in enumerate(self.travel) if link is not None}
        busy = [queue for queue in self.queues if not queue.parked]
        return bool(busy) and all(queue.at in links or waits_inside(queue.thread) for queue in busy)

    def describe(self) -> str:
        travel = [link.travel if link is not None else None for link in self.travel]
        with self.lock:
            return str(waits(self.desk, travel))

    def close(self) -> None:
        """End the threads; those that are still at work are left to end by themselves."""
        with self.lock:
            self.closed = True
        for queue in self.queues:
            thread = queue.thread
            if queue is not self.home and thread is not None and thread is not threading.current_thread():
                if queue.bell.locked():
                    queue.bell.release()
                thread.join(GRACE if queue.parked else 0.0)
