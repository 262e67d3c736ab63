"""The shortest order of a few tasks: all orders, but for those that cannot be better than one that is known."""

from collections.abc import Sequence

from .task_graph import TaskGraph

__all__ = ["exact_order"]

STEPS = 30_000  # tasks put behind others, over all orders together
NEAR = 1e-9


def exact_order(graph: TaskGraph, end: float) -> tuple[list[list[int]] | None, bool]:
    """The rows of an order that ends before `end`, if there is one, and whether all were looked at."""
    search = _Exact(graph, end)
    search.go([len(each) for each in graph.before], [0.0] * len(graph.devices), [0.0] * len(graph.tasks))
    return search.rows, search.steps > 0


class _Exact:
    def __init__(self, graph: TaskGraph, end: float) -> None:
        self.graph, self.end, self.steps = graph, end, STEPS
        self.rows: list[list[int]] | None = None
        self.done: list[int] = []
        self.held = [0.0] * len(graph.devices)

    def go(self, left: Sequence[int], free: Sequence[float], ready: Sequence[float]) -> None:
        """Put every task that can be next behind those that are done. Each order of the devices comes of such a one."""
        graph = self.graph
        if len(self.done) == len(graph.tasks):
            self.end = max(free)
            self.rows = [[n for n in self.done if graph.place[n] == d] for d in range(len(free))]
            return
        for n, many in enumerate(left):
            task, d = graph.tasks[n], graph.place[n]
            if many or self.held[d] + task.takes > graph.limits[d] * (1 + NEAR):
                continue
            end = max(free[d], ready[n]) + task.time
            if self.hopeless(left, free, n, d, end):
                continue
            self.steps -= 1
            if self.steps <= 0:
                return
            after, times = list(left), list(ready)
            after[n] = -1
            for to, delay in graph.behind[n]:
                after[to] -= 1
                times[to] = max(times[to], end + delay)
            self.done.append(n)
            self.held[d] += task.takes - task.frees
            self.go(after, [end if at == d else time for at, time in enumerate(free)], times)
            self.held[d] -= task.takes - task.frees
            self.done.pop()

    def hopeless(self, left: Sequence[int], free: Sequence[float], n: int, d: int, end: float) -> bool:
        graph, most = self.graph, self.end * (1 - NEAR)
        rest = sum(graph.tasks[m].time for m, many in enumerate(left) if many >= 0 and m != n and graph.place[m] == d)
        return end + max(graph.tails[n], rest) >= most
