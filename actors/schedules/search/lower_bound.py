"""Lower bounds of an order: no order of a task graph ends sooner.

alone   a device does one thing at a time: its tasks come in at their heads and leave for their tails. Were they
        allowed to interrupt each other, going on with the longest tail would be best (Jackson), and can be counted
room    what is held for some time at least takes room and time; limited memory has so much of both
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from .task_graph import TaskGraph

__all__ = ["alone", "lives_from", "room"]


def alone(heads: Sequence[float], times: Sequence[float], tails: Sequence[float]) -> float:
    """The least end of tasks on one device that may start at their heads and are followed by their tails.

    >>> alone([0, 1], [4, 2], [0, 5])
    8.0
    """
    coming = sorted(range(len(heads)), key=lambda n: heads[n])
    left = list(times)
    heap: list[tuple[float, int]] = []
    now, end, at = 0.0, 0.0, 0
    while heap or at < len(coming):
        if not heap:
            now = max(now, heads[coming[at]])
        while at < len(coming) and heads[coming[at]] <= now:
            heappush(heap, (-tails[coming[at]], coming[at]))
            at += 1
        tail, n = heap[0]
        until = heads[coming[at]] if at < len(coming) else inf
        spent = min(left[n], until - now)
        now += spent
        left[n] -= spent
        if left[n] <= 0:
            heappop(heap)
            end = max(end, now - tail)
    return end


def room(lives: Sequence[tuple[float, float]], limit: float) -> float:
    """A lower bound of the time that memory takes to hold things of such sizes for so long each.

    >>> room([(1, 6), (1, 6), (1, 6)], 2)
    9.0
    """
    return sum(size * life for size, life in lives) / limit if limit < inf and limit else 0.0


def lives_from(graph: TaskGraph, taker: int) -> dict[int, float]:
    """The least time from the start of a task to the end of each one behind it."""
    found = {taker: graph.tasks[taker].time}
    for n in graph.sorted:
        if n in found:
            for to, delay in graph.behind[n]:
                found[to] = max(found.get(to, 0.0), found[n] + delay + graph.tasks[to].time)
    return found
