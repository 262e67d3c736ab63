"""The search of a pipeline's order: F, B and W of every chunk and micro-batch under a limit of memory, for given times.

Memory is what the activations of a chunk and a micro-batch take: from the start of F to the end of W, or, where B frees
a part of them (`Costs.freed`), that part to the end of B.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Literal, TypeAlias, get_args

from ....placement.errors import ScheduleError
from ..definition import Shape
from ..pipeline import Costs
from ..preview import Preview
from ..published import PUBLISHED
from ..schedule import Schedule
from ..text import Action
from .lower_bound import alone, lives_from, room
from .order_tasks import OrderSearch, Rows, advice
from .task_graph import After, DeviceTask, TaskGraph

__all__ = ["FoundSchedule", "SearchedFor", "curve", "search"]

# The end of all, or the longest time of a device from its first task to its last, as steps may follow each other.
SearchedFor: TypeAlias = Literal["end", "span"]
_Way: TypeAlias = Literal["loop", "vee"]


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule that was found, and what no order of these tasks under this memory can be shorter than."""

    schedule: Schedule
    shape: Shape
    costs: tuple[Costs, ...]
    by: SearchedFor
    value: float
    bound: float
    limit: float  # of memory on each device, in slots where activations have no bytes
    further: float = 0.0  # an effort with which more orders would be tried, if there is one

    @cached_property
    def preview(self) -> Preview:
        return self.schedule.show(costs=self.costs)

    @property
    def end(self) -> float:
        return self.preview.end

    @property
    def bubble(self) -> float:
        return self.preview.bubble

    @property
    def slots(self) -> tuple[int, ...]:
        return self.preview.slots

    @property
    def memory(self) -> tuple[int, ...]:
        return self.preview.memory

    @property
    def gap(self) -> float:
        """The part by which this is longer than the bound; the best order lies between."""
        return self.value / self.bound - 1 if self.bound else 0.0

    def __str__(self) -> str:
        what = "ends at" if self.by == "end" else "spans"
        return (
            f"{self.schedule.name}: {what} {self.value:g}, no order less than {self.bound:g} ({self.gap:.1%}); "
            f"bubble {self.bubble:.4f}, slots {max(self.slots)}{advice(self)}"
        )


def search(
    p: int,
    m: int,
    *,
    costs: Costs | Sequence[Costs] | None = None,
    memory: float = inf,
    way: _Way = "loop",
    v: int = 0,
    split: bool = True,
    by: SearchedFor = "end",
    name: str = "found",
    known: Iterable[Schedule] = (),
    effort: float = 1.0,
) -> FoundSchedule:
    """An order of p devices and m micro-batches under a memory limit on each device, and a bound for all orders.

    `memory` is in bytes where costs have some, and else counts slots, a chunk and a micro-batch each. `by="span"` looks
    for the shortest time of the busiest device in place of the earliest end. The published orders and those of `known`
    that fit are where it begins, so that it is not worse than any of them. What is found is the same each time;
    `effort` is how long it looks, as usual by 1: what ends above its bound says with which more orders would be tried.
    """
    if way not in get_args(_Way) or by not in get_args(SearchedFor):
        ways, aims = (" or ".join(map(repr, get_args(of))) for of in (_Way, SearchedFor))
        raise ScheduleError(f"search of way={way!r} by={by!r}\n  way is {ways}, by is {aims}")
    pipe = _Pipe(Shape(p, m, v or (2 if way == "vee" else 1)), way, split, Costs() if costs is None else costs, memory)
    return pipe.search(by, name, known, effort)


def curve(p: int, m: int, memories: Sequence[float], **asked: object) -> tuple[FoundSchedule, ...]:
    """The orders that `search` finds under several limits of memory, each beginning with those of less memory."""
    found: list[FoundSchedule] = []
    for memory in sorted(memories):
        before = [found[-1].schedule] if found else []
        found.append(search(p, m, memory=memory, known=before, **asked))  # type: ignore[arg-type]
    return tuple(found)


class _Pipe:
    def __init__(self, shape: Shape, way: _Way, split: bool, costs: Costs | Sequence[Costs], memory: float) -> None:
        self.frame = Schedule("frame", way=way, v=shape.v, split=split)
        self.shape, self.way, self.limit = Shape(shape.p, shape.m, self.frame.v), way, memory
        shape = self.shape
        total = shape.p * shape.v
        self.costs = (costs,) * total if isinstance(costs, Costs) else tuple(costs)
        if len(self.costs) != total:
            raise ScheduleError(f"costs of {len(self.costs)} chunks for {total}\n  give one for each, or one for all")
        self.counted = not any(cost.bytes for cost in self.costs)
        self.kinds = "FBW" if split else "FB"
        self.least = max(sum(self.held(c) for c in self.on(s)) for s in range(shape.p))
        if not memory >= self.least:
            raise ScheduleError(
                f"no order of {shape} fits into {memory:g} {'slots' if self.counted else 'bytes'} on each device\n"
                f"  a micro-batch alone takes {self.least:g}: give so much, or more"
            )

    def on(self, s: int) -> list[int]:
        return [c for c in range(self.shape.p * self.shape.v) if self.frame.device(self.shape, c) == s]

    def held(self, c: int) -> float:
        return 1.0 if self.counted else float(self.costs[c].bytes)

    def freed(self, c: int, kind: str) -> float:
        """The part of a chunk that B or W frees."""
        if "W" not in self.kinds:
            return self.held(c)
        part = 0.0 if self.counted else float(self.costs[c].freed)
        return part if kind == "B" else self.held(c) - part

    @cached_property
    def graph(self) -> TaskGraph:
        tasks, after = [], []
        chunks, many = self.shape.p * self.shape.v, self.shape.m
        for c in range(chunks):
            s, cost = self.frame.device(self.shape, c), self.costs[c]
            back = cost.backward + cost.exchange + (0.0 if "W" in self.kinds else cost.weight)
            times = {"F": cost.forward + cost.exchange, "B": back, "W": cost.weight}
            hop = cost.hop if c + 1 < chunks and self.frame.device(self.shape, c + 1) != s else 0.0
            for k in range(many):
                for kind in self.kinds:
                    takes, frees = (self.held(c), 0.0) if kind == "F" else (0.0, self.freed(c, kind))
                    tasks.append(DeviceTask(_name(kind, c, k), f"device {s}", times[kind], takes, frees))
                    if k:
                        after.append(After(_name(kind, c, k), _name(kind, c, k - 1)))
                after.append(After(_name("B", c, k), _name("F", c, k)))
                if "W" in self.kinds:
                    after.append(After(_name("W", c, k), _name("B", c, k)))
                if c + 1 < chunks:
                    after.append(After(_name("F", c + 1, k), _name("F", c, k), hop))
                    after.append(After(_name("B", c, k), _name("B", c + 1, k), hop))
        return TaskGraph(tuple(tasks), tuple(after), self.limit, f"pipeline of {self.shape}")

    def at(self, kind: str, c: int, k: int) -> int:
        return self.graph.number[_name(kind, c, k)]

    def micro_batches_in_turn(self) -> list[int]:
        """Each through all chunks and back before the next: no order takes less memory."""
        chunks = range(self.shape.p * self.shape.v)
        found = []
        for k in range(self.shape.m):
            found += [self.at("F", c, k) for c in chunks]
            found += [self.at(kind, c, k) for c in reversed(chunks) for kind in self.kinds[1:]]
        return found

    def lists(self) -> list[list[float]]:
        """Lists of what goes first on every device: kinds, then micro-batches or groups of them, and chunks."""
        chunks, p = self.shape.p * self.shape.v, self.shape.p
        found = []
        for order in ("BFW", "FBW") if "W" in self.kinds else ("BF", "FB"):
            for group in (1, p) if self.shape.v > 1 else (1,):
                for deep in (False, True) if self.shape.v > 1 else (False,):
                    first = [0.0] * len(self.graph.tasks)
                    for c in range(chunks):
                        for kind in self.kinds:
                            turn = chunks - 1 - c if deep or kind != "F" else c
                            for k in range(self.shape.m):
                                key = ((order.index(kind) * self.shape.m + k // group) * chunks + turn) * p + k % group
                                first[self.at(kind, c, k)] = float(key)
                    found.append(first)
        return found

    def rows(self, schedule: Schedule) -> Rows | None:
        """The order of a schedule on this pipeline, if it is one of it and fits."""
        try:
            shape = schedule.shape(self.shape.p, self.shape.m, v=self.shape.v if not schedule.order else 0)
            if shape != self.shape or schedule.way != self.way or schedule.split != self.frame.split:
                return None
            if schedule.versions or schedule.slices or schedule.lifo or not schedule.in_turn:
                return None
            listed = schedule.rows(shape) or self.simulated(schedule)
        except ScheduleError:
            return None
        rows = [[self.at(*op[:3]) for op in row] for row in listed]
        fits = all(most <= self.limit * (1 + 1e-9) for most in self.graph.peaks(rows))
        return rows if fits and sum(map(len, rows)) == len(self.graph.tasks) else None

    def simulated(self, schedule: Schedule) -> list[list[Action]]:
        drawn = schedule.show(self.shape.p, self.shape.m, v=self.shape.v, costs=self.costs)
        return [
            [Action(bar.op.kind, self.on(s)[bar.op.chunk], bar.op.number) for bar in row]
            for s, row in enumerate(drawn.rows)
        ]

    def search(self, by: SearchedFor, name: str, known: Iterable[Schedule], effort: float) -> FoundSchedule:
        graph = self.graph
        heads = [min(graph.heads[n] for n, at in enumerate(graph.place) if at == d) for d in range(self.shape.p)]
        last = [max(heads) - head for head in heads] if by == "span" else []
        finder = OrderSearch(graph, self.micro_batches_in_turn(), last=last, effort=effort)
        orders = [rows for schedule in (*known, *PUBLISHED.values()) if (rows := self.rows(schedule)) is not None]
        rows, _ = finder.best(self.lists(), orders)
        table = tuple(" ".join(str(self.said(n)) for n in row) for row in rows)
        made = Schedule(name, way=self.way, table=table)
        how = self.shape, self.costs, by, 0.0, self.bound(by), self.limit
        found = FoundSchedule(made, *how, finder.further)
        value = found.end if by == "end" else max(found.preview.run.span(device) for device in graph.devices)
        return replace(found, value=value, bound=min(found.bound, value))

    def said(self, n: int) -> Action:
        kind, c, k = _parts(self.graph.tasks[n].name)
        return Action(kind, c // self.shape.p, k)

    def bound(self, by: SearchedFor) -> float:
        """A lower bound of what is searched for. Each device does all its tasks, holds what it holds for as long as the
        way there and back takes, and stands still where nothing has come back yet and no other micro-batch fits."""
        graph, found = self.graph, 0.0
        for d, s in enumerate(graph.devices):
            mine = [n for n, task in enumerate(graph.tasks) if task.device == s]
            times = [graph.tasks[n].time for n in mine]
            lives, limit, first = [], graph.limits[d], self.at("F", self.on(d)[0], 0)
            since = lives_from(graph, first)
            comes_back = min(since[self.at("B", c, 0)] - graph.tasks[self.at("B", c, 0)].time for c in self.on(d))
            for c in self.on(d):
                ends = lives_from(graph, self.at("F", c, 0))
                lives += [(self.freed(c, kind) * self.shape.m, ends[self.at(kind, c, 0)]) for kind in self.kinds[1:]]
            # How much of forwards fits before that: a chunk of which nothing is held is never too many.
            free = limit == inf or not all(self.held(c) for c in self.on(d))
            forwards = (
                inf
                if free
                else max((self.costs[c].forward + self.costs[c].exchange) / self.held(c) for c in self.on(d)) * limit
            )
            least = max(room(lives, limit), sum(times) + max(0.0, comes_back - forwards))
            if by == "span":
                heads = [since[n] - time for n, time in zip(mine, times, strict=True)]
                found = max(found, least, alone(heads, times, [0.0] * len(mine)))
            else:
                heads, tails = [graph.heads[n] for n in mine], [graph.tails[n] for n in mine]
                found = max(found, min(heads) + least + min(tails), alone(heads, times, tails))
        return found


def _name(kind: str, c: int, k: int) -> str:
    return f"{kind}{c}.{k}"


def _parts(name: str) -> tuple[str, int, int]:
    chunk, _, number = name[1:].partition(".")
    return name[0], int(chunk), int(number)
