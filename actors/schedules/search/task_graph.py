"""DeviceTask graphs: what devices have to do, what of it waits for what, and the memory that it takes and frees.

    task    runs on one device for some time; its memory is taken when it starts and freed when it ends
    after   one task starts when another has ended, and a delay is over

Memory that a task frees may have been taken by another one of its device: F of a pipeline takes what B and W free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from ....placement.errors import ScheduleError

__all__ = ["After", "DeviceTask", "TaskGraph"]


@dataclass(frozen=True, slots=True)
class DeviceTask:
    """One thing to do. It takes memory of its device when it starts, and frees some when it ends."""

    name: str
    device: str
    time: float = 1.0
    takes: float = 0.0
    frees: float = 0.0


@dataclass(frozen=True, slots=True)
class After:
    """`task` starts when `first` has ended and `delay` is over."""

    task: str
    first: str
    delay: float = 0.0


@dataclass(frozen=True)
class TaskGraph:
    """Tasks without circles, and how much memory each device has; one that is not named has no limit."""

    tasks: tuple[DeviceTask, ...]
    after: tuple[After, ...] = ()
    memory: Mapping[str, float] | float = inf
    name: str = "tasks"

    def __post_init__(self) -> None:
        if len(self.number) < len(self.tasks):
            twice = next(t.name for n, t in enumerate(self.tasks) if self.number[t.name] != n)
            raise ScheduleError(f"{self.name}: two tasks are called {twice}\n  give each its own name")
        for task in self.tasks:
            for field in ("time", "takes", "frees"):
                if not 0 <= getattr(task, field) < inf:
                    given = getattr(task, field)
                    raise ScheduleError(
                        f"{self.name}: {task.name} has {field}={given}\n  give a number of 0 or more that has an end"
                    )
        for edge in self.after:
            for name in (edge.task, edge.first):
                if name not in self.number:
                    raise ScheduleError(
                        f"{self.name}: {edge.task} is after {edge.first}, and no task is called {name}\n  add the task"
                    )
            if not 0 <= edge.delay < inf:
                raise ScheduleError(
                    f"{self.name}: {edge.task} is after {edge.first} and a delay of {edge.delay}\n"
                    "  give a delay of 0 or more that has an end"
                )
        if len(self.sorted) < len(self.tasks):
            stuck = sorted({t.name for t in self.tasks} - {self.tasks[n].name for n in self.sorted})
            raise ScheduleError(
                f"{self.name}: {', '.join(stuck[:6])} wait for each other in a circle\n  take one `After` of them out"
            )
        limits = self.memory if isinstance(self.memory, Mapping) else {"memory": self.memory}
        for device, most in limits.items():
            if not most >= 0:
                raise ScheduleError(f"{self.name}: {device} is limited to {most}\n  give a number of 0 or more")

    @cached_property
    def number(self) -> dict[str, int]:
        return {task.name: n for n, task in enumerate(self.tasks)}

    @cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.device for task in self.tasks))

    @cached_property
    def place(self) -> list[int]:
        """The number of each task's device."""
        at = {device: n for n, device in enumerate(self.devices)}
        return [at[task.device] for task in self.tasks]

    @cached_property
    def limits(self) -> list[float]:
        """The memory limit of each device."""
        given = self.memory
        return [given.get(device, inf) if isinstance(given, Mapping) else given for device in self.devices]

    @cached_property
    def behind(self) -> list[list[tuple[int, float]]]:
        """By task those that are after it, with their delays."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.tasks]
        for edge in self.after:
            found[self.number[edge.first]].append((self.number[edge.task], edge.delay))
        return found

    @cached_property
    def before(self) -> list[list[tuple[int, float]]]:
        """By task those that it is after, with their delays."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.tasks]
        for edge in self.after:
            found[self.number[edge.task]].append((self.number[edge.first], edge.delay))
        return found

    @cached_property
    def sorted(self) -> list[int]:
        """Every task behind those that it is after."""
        left = [len(each) for each in self.before]
        ready = [n for n, many in enumerate(left) if not many]
        for n in ready:
            for to, _ in self.behind[n]:
                left[to] -= 1
                if not left[to]:
                    ready.append(to)
        return ready

    @cached_property
    def heads(self) -> list[float]:
        """The earliest start of each task, were there a device for every task."""
        found = [0.0] * len(self.tasks)
        for n in self.sorted:
            end = found[n] + self.tasks[n].time
            for to, delay in self.behind[n]:
                found[to] = max(found[to], end + delay)
        return found

    @cached_property
    def tails(self) -> list[float]:
        """The time that is still to come when each task has ended."""
        found = [0.0] * len(self.tasks)
        for n in reversed(self.sorted):
            rest = (delay + self.tasks[to].time + found[to] for to, delay in self.behind[n])
            found[n] = max(rest, default=0.0)
        return found

    def starts(self, rows: Sequence[Sequence[int]]) -> list[float] | None:
        """The start of each task if devices do them in such orders; None if they wait for each other."""
        behind: list[list[tuple[int, float]]] = [list(each) for each in self.behind]
        left = [len(each) for each in self.before]
        for row in rows:
            for n, to in pairwise(row):
                behind[n].append((to, 0.0))
                left[to] += 1
        found = [0.0] * len(self.tasks)
        ready = [n for n, many in enumerate(left) if not many]
        for n in ready:
            end = found[n] + self.tasks[n].time
            for to, delay in behind[n]:
                found[to] = max(found[to], end + delay)
                left[to] -= 1
                if not left[to]:
                    ready.append(to)
        return found if len(ready) == len(self.tasks) else None

    def peaks(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The most memory that each device holds, doing tasks in such orders."""
        found = []
        for row in rows:
            held = most = 0.0
            for n in row:
                held += self.tasks[n].takes
                most = max(most, held)
                held -= self.tasks[n].frees
            found.append(most)
        return found
