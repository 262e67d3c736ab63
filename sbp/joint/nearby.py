"""What one node costs while all others stay: the forward greedy, the price of each swap, and small improvements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import Problem, Vector

__all__ = ["Nearby", "Swap", "greedy", "swaps"]


@dataclass(frozen=True, slots=True)
class Swap:
    """The best other candidate of a node, and what it would cost more if nothing else changed; inf if there is none."""

    candidate: int
    seconds: float


class Nearby:
    """Who shares an edge with whom."""

    def __init__(self, problem: Problem) -> None:
        self.costs = list(problem.costs)
        self.around: list[list[tuple[int, Vector]]] = [[] for _ in problem.costs]  # (other, [other, own])
        for edge in problem.edges:
            if edge.i == edge.j:
                self.costs[edge.i] = self.costs[edge.i] + edge.matrix.diagonal()
            else:
                self.around[edge.i].append((edge.j, edge.matrix.T))
                self.around[edge.j].append((edge.i, edge.matrix))

    def seconds(self, node: int, choice: Sequence[int]) -> Vector:
        """Of each candidate; only neighbours in `choice`, which may end early, count."""
        total = self.costs[node]
        for other, matrix in self.around[node]:
            if other < len(choice):
                total = total + matrix[choice[other]]
        return total

    def improved(self, problem: Problem, choice: Sequence[int], limit: float) -> tuple[int, ...]:
        """A choice no dearer that fits in `limit` bytes: nodes tied to none take what is better, one by one."""
        found, held = list(choice), problem.bytes(choice)
        loose = [n for n in range(len(found)) if not problem.tied or problem.tied[n] < 0]
        for _ in range(5):
            before = list(found)
            for n in loose:
                seconds, memory = self.seconds(n, found), problem.memory[n]
                bytes = held - memory[found[n]] + memory
                at = int(np.where(bytes <= limit, seconds, np.inf).argmin())
                if seconds[at] < seconds[found[n]]:
                    held += float(memory[at] - memory[found[n]])
                    found[n] = at
            if found == before:
                break
        return tuple(found)


def greedy(problem: Problem) -> tuple[int, ...]:
    """In the order of the nodes, each takes what is cheapest after those before it; which may end forbidden."""
    nearby = Nearby(problem)
    choice: list[int] = []
    for node in range(len(problem.costs)):
        choice.append(int(nearby.seconds(node, choice).argmin()))
    return tuple(choice)


def swaps(problem: Problem, choice: Sequence[int]) -> list[Swap]:
    """For each node the best other candidate, its neighbours as they are; candidate -1 where there is no other."""
    nearby = Nearby(problem)
    found = []
    for node, own in enumerate(choice):
        seconds = nearby.seconds(node, choice)
        extra = seconds - seconds[own]
        extra[own] = np.inf
        at = int(extra.argmin())
        found.append(Swap(at, float(extra[at])) if np.isfinite(extra[at]) else Swap(-1, np.inf))
    return found
