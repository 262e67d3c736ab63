"""Orders by list: at every instant each free device begins, of what may run there, the task that comes first.

Two things keep the greedy from what it would regret. It waits for a task that comes before those which are ready, if
one of these would be in its way (`patience`). And it takes no memory that it could not get back: it knows one order of
all tasks that fits into memory, and begins a task out of that order only if all the rest of it still fits behind.

A list read backwards makes orders too: from the end of all tasks to their start, in which what was freed is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from .task_graph import TaskGraph

__all__ = ["ListOrder", "Listed"]

SLACK = 1e-9  # relative: sums of floats that are one instant, or one size


@dataclass(frozen=True)
class Listed:
    """An order: a row of tasks for each device, and when each task starts and ends."""

    rows: list[list[int]]
    starts: list[float]
    ends: list[float]


class ListOrder:
    """The list scheduler of a graph, forwards or backwards in time; `fits` is an order of all tasks that fits."""

    def __init__(self, graph: TaskGraph, fits: Sequence[int], *, back: bool = False) -> None:
        tasks = graph.tasks
        self.place, self.limits, self.count = graph.place, graph.limits, len(tasks)
        self.times = [task.time for task in tasks]
        self.takes, self.frees = [task.takes for task in tasks], [task.frees for task in tasks]
        self.behind, self.before = graph.behind, graph.before
        self.held = [0.0] * len(graph.devices)
        order = list(fits)
        if back:
            for n, at in enumerate(self.place):
                self.held[at] += self.takes[n] - self.frees[n]  # what nobody frees is there at the end
            self.takes, self.frees, order = self.frees, self.takes, order[::-1]
            self.behind, self.before = self.before, self.behind
        self.limits = [most * (1 + SLACK) for most in self.limits]
        self.known: list[list[int]] = [[] for _ in graph.devices]  # by device the order that fits
        self.at = [0] * self.count
        for n in order:
            row = self.known[self.place[n]]
            self.at[n] = len(row)
            row.append(n)

    def run(self, first: Sequence[float], patience: float, earliest: Sequence[float]) -> Listed:
        """The order in which tasks with small numbers in `first` go first; devices begin no sooner than `earliest`."""
        self.first, self.patience = first, patience
        devices = range(len(self.known))
        self.done = [False] * self.count
        self.begun = [0] * len(self.known)  # of the order that fits, what is done without a gap
        self.ahead = [-1] * len(self.known)  # the last in it that is done
        self.memory = list(self.held)
        self.ready_at = [earliest[at] for at in self.place]
        self.open: list[list[int]] = [[] for _ in devices]  # whose predecessors have all begun
        left = [len(each) for each in self.before]
        starts, ends = [0.0] * self.count, [0.0] * self.count
        rows: list[list[int]] = [[] for _ in devices]
        free = list(earliest)
        heap: list[tuple[float, int]] = []
        for n, many in enumerate(left):
            if not many:
                self.open[self.place[n]].append(n)
        for d in devices:
            heappush(heap, (free[d], d))
        while heap:
            now, d = heappop(heap)
            if free[d] > now:
                continue
            n = self.choose(d, now)
            if n < 0:
                continue
            self.open[d].remove(n)
            self.begin(d, n)
            starts[n], end = now, now + self.times[n]
            ends[n] = free[d] = end
            rows[d].append(n)
            for to, delay in self.behind[n]:
                left[to] -= 1
                ready = end + delay
                if ready > self.ready_at[to]:
                    self.ready_at[to] = ready
                if not left[to]:
                    there = self.place[to]
                    self.open[there].append(to)
                    heappush(heap, (self.ready_at[to], there))
            heappush(heap, (end, d))
        assert sum(map(len, rows)) == self.count, "an order that fits is always left"
        return Listed(rows, starts, ends)

    def choose(self, d: int, now: float) -> int:
        """The task that a free device begins, or -1 to wait."""
        first, ready_at = self.first, self.ready_at
        limit = now + SLACK * (1.0 + abs(now))
        waited = -1.0  # when something is ready that is worth waiting for
        for n in sorted(self.open[d], key=lambda n: (first[n], n)):
            if ready_at[n] > limit:
                if self.patience and (waited < 0 or ready_at[n] < waited) and self.fits(d, n):
                    waited = ready_at[n]
                continue
            if waited >= 0 and now + self.times[n] * self.patience > waited + SLACK * (1.0 + waited):
                continue
            if self.fits(d, n):
                return n
        return -1

    def fits(self, d: int, n: int) -> bool:
        """Whether there is memory for a task now, and behind it for all others in the order that fits."""
        known, done, limit = self.known[d], self.done, self.limits[d]
        held = self.memory[d] + self.takes[n]
        if held > limit:
            return False
        at = self.begun[d]
        if known[at] == n:
            return True
        held -= self.frees[n]
        takes, frees = self.takes, self.frees
        for m in known[at : max(self.ahead[d], self.at[n])]:
            if done[m] or m == n:
                continue
            held += takes[m]
            if held > limit:
                return False
            held -= frees[m]
        return True

    def begin(self, d: int, n: int) -> None:
        self.done[n] = True
        self.memory[d] += self.takes[n] - self.frees[n]
        self.ahead[d] = max(self.ahead[d], self.at[n])
        known, at = self.known[d], self.begun[d]
        while at < len(known) and self.done[known[at]]:
            at += 1
        self.begun[d] = at
