"""The crew of a runtime: the threads, one a queue, and the step that they are at.

    one lock    guards the desk; a firing takes it once, to end what was done and to begin what comes next
    bells       a queue with nothing ready is parked and sleeps on its own; who makes something ready rings it
    the end     all queues are parked: either every actor has ended, or nothing can go on

Work may have two halves, as that of links to other processes has: `begin(firing, free)` starts it and returns, and is
called by the thread that made it ready, so that nothing that travels waits for a thread to wake up; the call waits.
A queue that goes by an order knows which arrival its next firing needs, and waits for it itself, without a thread.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter
from typing import Any

from ..placement.errors import ScheduleError, TransportError
from .desk import Desk, Firing, Slot
from .plan import Plan
from .protocol import Event, Message, Wiring
from .queues import Begins, Begun, Queue, lend, needed
from .simulate import Ran

__all__ = ["Crew"]

PATIENCE = 1.0  # seconds between looks at whether anything goes on
GRACE = 10.0  # seconds in which a queue must stop after an error


class Crew:
    """Threads for all queues but one, which the calling thread drives."""

    def __init__(self, plan: Plan) -> None:
        network = plan.network
        self.plan, self.guard = plan, plan.guard
        self.wiring = wiring = Wiring(network)
        self.work = [plan.work[actor.name] for actor in network.actors]
        self.begin: list[Callable[[Firing, int], None] | None] = [getattr(w, "begin", None) for w in self.work]
        self.outs = [
            [(g, (give := w.actor.gives[g]).every, network.register(give.register).initial) for g in w.give]
            for w in wiring.actors
        ]  # of every out edge: the give, and how its slots are numbered
        orders = {queue: tuple(wiring.number[name] for name in names) for queue, names in plan.order.items()}
        self.queues = [Queue(at, name, orders.get(name)) for at, name in enumerate(network.queues)]
        self.home = self.queues[network.queues.index(plan.here) if plan.here else 0] if self.queues else None
        if self.home is not None:
            lend(self.home, self.queues, wiring, self.work)
        self.lock = threading.Lock()
        self.closed = False
        self.error: BaseException | None = None
        self.failed = self.progressed = 0.0
        self.over, self.busy, self.fired, self.seen = True, 0, 0, 0  # `busy` counts queues that are not parked
        self.ran: list[Ran] | None = None

    def run(self, record: bool) -> list[Ran]:
        """One step, to the end or to the first error."""
        home = self.home
        if home is None:
            return []
        if home.thread is None:
            self.hire(home)
        self.desk = Desk(self.wiring)
        for register, values in self.plan.initial.items():
            self.fill(register, values())
        for queue in self.queues:
            queue.turn = 0
        self.ran = [] if record else None
        self.error, self.over, self.busy, self.fired = None, False, 1, 0
        self.seen, self.progressed = 0, monotonic()
        home.parked = False
        if self.guard is not None:
            self.guard.enter(self)
        try:
            try:
                self.step(home)
                if self.error is None and not self.desk.ended:
                    self.fail(ScheduleError(f"{self.plan.name} cannot go on\n{self.describe()}"))
            except BaseException as error:  # from the keyboard
                self.fail(error)
            if self.error is not None:
                self.settle(home)
        finally:
            if self.guard is not None:
                self.guard.leave()
            del self.desk  # and with it every value
        ran, self.ran = self.ran, None
        if self.error is not None:
            raise self.error
        return sorted(ran or (), key=lambda each: each.start)

    def fill(self, register: str, values: Sequence[Any]) -> None:
        """Put values in the slots that are filled at the start."""
        known = self.wiring.network.register(register)
        if len(values) != known.initial:
            raise ScheduleError(
                f"{len(values)} values for {register}, of which {known.initial} slots are filled at first"
            )
        for at, actor in enumerate(self.wiring.network.actors):
            for port, take in enumerate(actor.takes):
                if take.register == register:
                    slots = self.desk.slots[at][port]
                    slots.clear()
                    slots.extend([Slot(n, value) for n, value in enumerate(values)])

    def hire(self, home: Queue) -> None:
        for queue in self.queues:
            if queue is not home and queue.lender is None:
                called = f"sbpflow {self.plan.name}: {queue.name}"
                queue.thread = threading.Thread(target=self.serve, args=(queue,), name=called, daemon=True)
                queue.thread.start()
        home.thread = threading.current_thread()

    def serve(self, queue: Queue) -> None:
        """The life of a thread."""
        while True:
            queue.bell.acquire()
            if self.closed:
                return
            self.drive(queue)

    def step(self, home: Queue) -> None:
        """The calling thread's part: drive its queue until all is over, and see that something goes on meanwhile."""
        begins: Begins = []
        with self.lock:
            for queue in self.queues:
                self.wake(queue, begins)
        self.start(begins)
        over = self.drive(home)
        wait = min(PATIENCE, self.plan.timeout / 4)
        while not over and self.error is None:
            if home.bell.acquire(timeout=wait):
                over = self.over or self.drive(home)
            else:
                self.look()

    def settle(self, home: Queue) -> None:
        """After an error, wait until all queues have stopped."""
        with self.lock:
            self.drop(home)
            if not home.parked:
                self.park(home)
        while not self.over:
            home.bell.acquire(timeout=PATIENCE)
            if monotonic() - self.failed > GRACE and self.error is not None:
                self.error.add_note(f"after that {self.at_work()} did not stop within {GRACE:g} s")
                return

    def drive(self, queue: Queue) -> bool:
        """Run what is ready until nothing is; whether that was the end of the step."""
        lock, work, record = self.lock, self.work, self.ran is not None
        begins: Begins = []
        firing: Firing | None = None
        values: Sequence[Any] | None = None
        start, over = 0.0, False
        doing = queue  # or one that is lent to it
        try:
            if queue.begun is not None:
                (firing, start), queue.begun = queue.begun, None
                values = work[firing.actor](firing)
            while True:
                end = perf_counter() if record else 0.0
                begin = None
                with lock:
                    if firing is not None:
                        self.finish(firing, values, begins)
                        if record:
                            self.note(firing, start, end)
                        if doing is not queue:
                            self.go_on(doing, begins)
                            doing = queue
                        firing = values = None  # what it held may be let go by others from now on
                    at = self.pick(queue)
                    if at is not None:
                        firing = self.desk.fire(at)
                        begin = self.begin[at]
                        free = 0 if begin is None else self.free(at)
                        start = perf_counter() if record else 0.0
                    elif not begins:
                        if self.error is not None:
                            self.drop(queue)
                        other = needed(queue, self.queues, self.desk) if queue.lent else None
                        if other is None:
                            over = self.park(queue)
                        elif other.begun is not None:
                            doing = other
                            (firing, start), other.begun = other.begun, None
                if begins:
                    self.start(begins)
                    if firing is None:
                        continue
                if firing is None:
                    return over
                if begin is not None:
                    begin(firing, free)
                values = work[firing.actor](firing)
        except BaseException as error:  # whatever it is, the step must end on every queue
            self.fail(error, firing)
            firing = values = None
            with lock:
                for waiting, _, _ in begins:
                    self.park(waiting)
                if doing is not queue:
                    self.park(doing)
                self.drop(queue)
                return self.over if queue.parked else self.park(queue)

    def drop(self, queue: Queue) -> None:
        """After an error nobody waits any more for what is lent."""
        for other in queue.lent:
            if other.begun is not None:
                other.begun = None
                self.park(other)

    def go_on(self, queue: Queue, begins: Begins) -> None:
        """What a lent queue does after an arrival."""
        at = self.pick(queue)
        if at is None:
            self.park(queue)
        else:
            begins.append((queue, self.desk.fire(at), self.free(at)))

    def pick(self, queue: Queue) -> int | None:
        """The actor that the queue runs now."""
        ready = self.desk.ready[queue.at]
        if not ready or self.error is not None:
            return None
        if queue.order is None:
            return self.desk.next(queue.at)
        at = queue.order[queue.turn] if queue.turn < len(queue.order) else None
        if at in ready:
            queue.turn += 1
            return at
        return None

    def free(self, at: int) -> int:
        """How many more firings of an actor have a free slot already."""
        return min(self.desk.states[at].credits, default=0)

    def finish(self, firing: Firing, values: Sequence[Any] | None, begins: Begins) -> None:
        """End a firing: its values go to where they are read, and what it read is let go."""
        gives = self.wiring.actors[firing.actor].actor.gives
        if values is None:
            values = (None,) * len(gives)
        elif len(values) != len(gives):
            raise ScheduleError(f"the work of an actor that fills {len(gives)} registers gave {len(values)} values")
        self.fired += 1
        self.post(firing.actor, firing.label, values, self.desk.done(firing.actor), begins)

    def post(self, at: int, label: int, values: Sequence[Any], messages: tuple[Message, ...], begins: Begins) -> None:
        """Carry messages, and wake the queues that they make something ready on."""
        desk, wiring = self.desk, self.wiring
        for kind, port, slots in messages:
            if kind == "freed":
                to, out = wiring.producer[at][port]
                if to < 0:
                    continue
                event = Event("freed", out, slots)
            else:
                to, take = wiring.consumer[at][port]
                if kind == "end":
                    event = Event("end", take)
                else:
                    give, every, first = self.outs[at][port]
                    first += label // every * slots
                    value = values[give]
                    waiting = desk.slots[to][take]
                    if slots == 1:
                        waiting.append(Slot(first, value))
                    else:
                        several = value if value is not None else (None,) * slots
                        waiting.extend([Slot(first + n, several[n]) for n in range(slots)])
                    event = Event("filled", take, slots)
            more = desk.tell(to, event)
            if more:
                self.post(to, 0, (), more, begins)
            queue = self.queues[desk.queue[to]]
            if queue.parked:
                self.wake(queue, begins)

    def wake(self, queue: Queue, begins: Begins) -> None:
        """Ring the bell of a queue that has something ready; work of two halves begins before that."""
        if not queue.parked:
            return
        ready = self.desk.ready[queue.at]
        if not ready or self.error is not None:
            return
        if queue.order is not None and (queue.turn == len(queue.order) or queue.order[queue.turn] not in ready):
            return
        queue.parked = False
        self.busy += 1
        at = self.desk.next(queue.at)
        if at is not None and queue.order is None and self.begin[at] is not None:
            firing = self.desk.fire(at)
            begins.append((queue, firing, self.free(at)))
        else:
            queue.bell.release()

    def start(self, begins: Begins) -> None:
        """Begin work for others, and then ring their bells: first what travels, then what only waits."""
        bells: list[Queue] = []
        while begins:
            queue, firing, free = begins.pop(0)
            begin = self.begin[firing.actor]
            assert begin is not None
            start = perf_counter()
            try:
                if self.error is None:
                    begin(firing, free)
            except Exception as error:
                self.fail(error, firing)
            if self.error is not None:
                with self.lock:
                    self.park(queue)
                continue
            queue.begun = Begun(firing, start)
            if queue.lender is None:
                bells.append(queue)
        for queue in bells:
            queue.bell.release()

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
        actor = self.wiring.actors[firing.actor].actor
        self.ran.append(Ran(actor.name, actor.cases[firing.case], firing.label, actor.queue, start, end))

    def fail(self, error: BaseException, firing: Firing | None = None, *, told: bool = False) -> None:
        """End the step with an error, the first that comes. `told`: the other processes know."""
        where = ""
        if firing is not None:
            actor = self.wiring.actors[firing.actor].actor
            case = actor.cases[firing.case]
            where = f"{actor.name}{f' ({case})' if case else ''}, micro-batch {firing.label}"
        with self.lock:
            if self.error is not None:
                return
            self.error, self.failed = error, monotonic()
            if where:
                error.add_note(f"in actor {where}, on queue {actor.queue}")
        if self.guard is not None and not told:
            self.error = self.guard.tell(where, error)

    def look(self) -> None:
        """See that something goes on; where nothing does, give up."""
        now = monotonic()
        if self.fired != self.seen:
            self.seen, self.progressed = self.fired, now
        elif self.error is None and now - self.progressed > self.plan.timeout:
            self.report()
            error = ScheduleError if self.guard is None else TransportError
            self.fail(
                error(
                    f"{self.plan.name} made no progress for {self.plan.timeout:g} s; at work: {self.at_work()}\n"
                    "  stderr tells who waits for whom; where firings do take that long, give a longer timeout="
                )
            )

    def at_work(self) -> str:
        return ", ".join(queue.name for queue in self.queues if not queue.parked) or "nobody"

    def report(self) -> None:
        """Print who waits for whom."""
        with self.lock:
            text = self.describe()
        print(f"{self.plan.name}: who waits for whom\n{text}", file=sys.stderr, flush=True)

    def describe(self) -> str:
        from .proof import waits  # it is needed only when something went wrong

        return str(waits(self.desk))

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
