"""Orders of any tasks under limits of memory, found by lists that are read forwards and backwards in turn.

A list is an order for `ListOrder`. The first ones are of the tasks that have the most behind them, and of those that
have the most before them; what they make is read backwards, the last to end first, and that again forwards, the first
to start first, until nothing gets shorter. Then the best list is disturbed a little, again and again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from random import Random
from typing import Protocol

from ....placement.errors import ScheduleError
from .exact_order import exact_order
from .list_order import Listed, ListOrder
from .lower_bound import alone
from .task_graph import TaskGraph

__all__ = ["FoundOrder", "OrderSearch", "advice", "order_tasks", "sequence_that_fits"]

STATES = 20_000  # that are looked at for a sequence which fits
WORK = 250_000  # tasks that all lists together begin, for an effort of 1
MOST = 2000  # lists
MORE = 4  # times the effort is what is advised where an order ends above its bound
FEW = 12  # tasks of which all orders are looked at
PATIENCE = (0.0, 1.0, 0.5)
POLISHED = 5  # of the first orders
ROUNDS = 4  # of reading backwards and forwards
NEAR = 1e-9


@dataclass(frozen=True)
class FoundOrder:
    """An order of each device's tasks, with its end, a lower bound of every order's end, and the memory it takes."""

    graph: TaskGraph
    rows: tuple[tuple[str, ...], ...]
    starts: dict[str, float]
    end: float
    bound: float
    further: float = 0.0  # an effort with which more orders would be tried, if there is one

    @property
    def gap(self) -> float:
        """The part by which the end may be too late at most."""
        return self.end / self.bound - 1 if self.bound else 0.0

    @cached_property
    def memory(self) -> dict[str, float]:
        """By device the most that it holds."""
        number = self.graph.number
        peaks = self.graph.peaks([[number[name] for name in row] for row in self.rows])
        return dict(zip(self.graph.devices, peaks, strict=True))

    def __str__(self) -> str:
        said = [
            f"{self.graph.name}: ends at {self.end:g}, no order before {self.bound:g} ({self.gap:.1%}){advice(self)}"
        ]
        for device, row in zip(self.graph.devices, self.rows, strict=True):
            said.append(f"  {device:<10} {' '.join(row)}")
        return "\n".join(said)


def order_tasks(graph: TaskGraph, *, effort: float = 1.0) -> FoundOrder:
    """An order of tasks under the memory limits of their devices: the shortest of a few tasks, a short one of many.

    It is the same each time. `effort` is how many lists are tried, as many as usual by 1.

    >>> from .task_graph import After, DeviceTask
    >>> tasks = DeviceTask("a", "x", 2), DeviceTask("b", "y", 3), DeviceTask("c", "x", 1)
    >>> print(order_tasks(TaskGraph(tasks, (After("b", "c"),))))
    tasks: ends at 4, no order before 4 (0.0%)
      x          c a
      y          b
    """
    if not graph.tasks:
        return FoundOrder(graph, (), {}, 0.0, 0.0)
    search = OrderSearch(graph, sequence_that_fits(graph), effort=effort)
    rows, starts = search.best([])
    bound = search.bound
    if len(graph.tasks) <= FEW and search.found[0] > bound:
        shorter, all_seen = exact_order(graph, search.score(rows, starts))
        if shorter is not None:
            search.take(shorter)
            _, rows, starts = search.found
        bound = search.score(rows, starts) if all_seen else bound
    names = tuple(tuple(graph.tasks[n].name for n in row) for row in rows)
    at = {task.name: start for task, start in zip(graph.tasks, starts, strict=True)}
    return FoundOrder(graph, names, at, search.score(rows, starts), bound, search.further)


class _Found(Protocol):
    @property
    def gap(self) -> float: ...

    @property
    def further(self) -> float: ...


def advice(found: _Found) -> str:
    """The words behind an order that ends above its bound, where a longer search may find a better one."""
    return f"; try effort={found.further:g}" if found.gap > NEAR and found.further else ""


Rows = list[list[int]]


class OrderSearch:
    """The search of a short order. Devices have `last` to do behind all tasks."""

    def __init__(
        self, graph: TaskGraph, fits: Sequence[int], *, last: Sequence[float] = (), effort: float = 1.0
    ) -> None:
        if not 0 < effort < inf:
            raise ScheduleError(f"{graph.name}: effort={effort}\n  give a number above 0; 1 is usual")
        self.graph = graph
        self.earliest = [0.0] * len(graph.devices)
        self.last = list(last or self.earliest)
        self.ahead, self.back = ListOrder(graph, fits), ListOrder(graph, fits, back=True)
        many = len(graph.tasks)
        self.left = 50 if many <= FEW else min(MOST, max(12, int(effort * WORK) // many))  # lists to be tried
        self.further = effort * MORE if many > FEW and self.left < MOST else 0.0  # with which it would try more lists
        self.found: tuple[float, Rows, list[float]] = inf, [], []

    @cached_property
    def bound(self) -> float:
        """No order ends sooner, as each device has its tasks one behind the other."""
        graph = self.graph
        found = 0.0
        for d in range(len(graph.devices)):
            mine = [n for n, at in enumerate(graph.place) if at == d]
            heads = [graph.heads[n] for n in mine]
            tails = [max(graph.tails[n], self.last[d]) for n in mine]
            found = max(found, alone(heads, [graph.tasks[n].time for n in mine], tails))
        return found

    def score(self, rows: Rows, starts: Sequence[float]) -> float:
        """The time at which all is done."""
        ends = (starts[row[-1]] + self.graph.tasks[row[-1]].time if row else 0.0 for row in rows)
        return max(end + last for end, last in zip(ends, self.last, strict=True))

    def take(self, rows: Rows) -> float:
        """An order, kept if it is the best; when it ends."""
        starts = self.graph.starts(rows)
        if starts is None:
            return inf
        end = self.score(rows, starts)
        if end < self.found[0] * (1 - NEAR):
            self.found = end, rows, starts
        return end

    def best(self, lists: Sequence[Sequence[float]], orders: Sequence[Rows] = ()) -> tuple[Rows, list[float]]:
        """The best order that was found, beginning with some lists and whole orders of others."""
        graph = self.graph
        for rows in orders:
            self.take(rows)
        tail = [-rest - task.time for rest, task in zip(graph.tails, graph.tasks, strict=True)]
        begun = [list(first) for first in lists] + [tail, graph.heads]
        begun += [starts for rows in orders if (starts := graph.starts(rows))]
        tried: list[tuple[float, int, Listed, float]] = []
        for first in begun:
            for patience in PATIENCE:
                if not self.over:
                    made = self.ahead.run(first, patience, self.earliest)
                    self.left -= 1
                    tried.append((self.take(made.rows), len(tried), made, patience))
        for _, _, made, patience in sorted(tried, key=lambda each: each[:2])[:POLISHED]:
            self.polish(made, patience)
        for first, patience in self.disturbed():
            self.left -= 1
            made = self.ahead.run(first, patience, self.earliest)
            self.take(made.rows)
            self.polish(made, patience)
        return self.found[1], self.found[2]

    @property
    def over(self) -> bool:
        """Whether an order was found that nothing is sooner than, or so many lists were tried."""
        return bool(self.found[1]) and (self.left <= 0 or self.found[0] <= self.bound * (1 + NEAR))

    def polish(self, made: Listed, patience: float) -> None:
        """Read an order backwards, what comes of it forwards, and so on while it gets shorter."""
        for _ in range(ROUNDS):
            if self.over:
                return
            turned = self.back.run([-end for end in made.ends], patience, self.last)
            there = self.take([row[::-1] for row in turned.rows])
            again = self.ahead.run([-end for end in turned.ends], patience, self.earliest)
            self.left -= 2
            if min(there, self.take(again.rows)) >= self.score(made.rows, made.starts) * (1 - NEAR):
                return
            made = again

    def disturbed(self) -> Iterator[tuple[list[float], float]]:
        """The best list with some tasks moved, again and again; the same ones in every run."""
        draw = Random(0)
        while not self.over:
            end, _, starts = self.found
            far = draw.choice((0.01, 0.03, 0.1)) * end
            yield [at + draw.uniform(-far, far) for at in starts], draw.choice(PATIENCE)


def sequence_that_fits(graph: TaskGraph) -> list[int]:
    """All tasks in an order that fits into memory, one behind the other. Where a way ends nowhere, others are tried."""
    state = _Sequence(graph)
    seen: set[frozenset[int]] = set()  # sets of tasks behind which there is no way
    stack = [iter(state.nexts())]
    while len(state.order) < len(graph.tasks) and len(seen) < STATES:
        n = next(stack[-1], None)
        if n is not None:
            state.go(n)
            stack.append(iter(() if seen and frozenset(state.order) in seen else state.nexts()))
            continue
        seen.add(frozenset(state.order))
        stack.pop()
        if not stack:
            break
        state.back()
    if len(state.order) < len(graph.tasks):
        raise ScheduleError(_does_not_fit(graph, len(seen) >= STATES))
    return state.order


class _Sequence:
    """Some tasks one behind the other, what may be next, and the memory that is held."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph, self.order = graph, list[int]()
        self.left = [len(each) for each in graph.before]
        self.held = [0.0] * len(graph.devices)
        self.ready = {n for n, many in enumerate(self.left) if not many}

    def nexts(self) -> list[int]:
        """Tasks that fit: one that frees no less than it takes is never wrong; else deep ones first, to end them."""
        tasks, place, limits, tails = self.graph.tasks, self.graph.place, self.graph.limits, self.graph.tails
        may = [n for n in self.ready if self.held[place[n]] + tasks[n].takes <= limits[place[n]] * (1 + NEAR)]
        free = [n for n in may if tasks[n].takes <= tasks[n].frees]
        return [min(free)] if free else sorted(may, key=lambda n: (tails[n], n))

    def go(self, n: int) -> None:
        task = self.graph.tasks[n]
        self.order.append(n)
        self.ready.discard(n)
        self.held[self.graph.place[n]] += task.takes - task.frees
        for to, _ in self.graph.behind[n]:
            self.left[to] -= 1
            if not self.left[to]:
                self.ready.add(to)

    def back(self) -> None:
        n = self.order.pop()
        task = self.graph.tasks[n]
        for to, _ in self.graph.behind[n]:
            self.left[to] += 1
            self.ready.discard(to)
        self.held[self.graph.place[n]] -= task.takes - task.frees
        self.ready.add(n)


def _does_not_fit(graph: TaskGraph, gave_up: bool) -> str:
    limits = ", ".join(f"{d} {most:g}" for d, most in zip(graph.devices, graph.limits, strict=True) if most < inf)
    said = "was found" if gave_up else "exists"
    return f"{graph.name}: no order {said} that fits into memory: {limits}\n  give more, or tasks that take less"
