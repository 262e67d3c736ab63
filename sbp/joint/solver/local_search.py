"""Local search: one node changes while all others stay, for the greedy, the price of swaps, and improvements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Problem, Vector

__all__ = ["Nearby", "Swap", "greedy", "swaps"]


@dataclass(frozen=True, slots=True)
class Swap:
    """The best other candidate of a node, and what it would cost more if nothing else changed; inf if there is none."""

    candidate: int
    seconds: float


class Nearby:
    """The neighbours of each node, which share an edge with it."""

    def __init__(self, problem: Problem) -> None:
        self.costs = list(problem.costs)
        self.rest = [-room for room in problem.room] or [np.zeros_like(cost) for cost in problem.costs]
        self.around: list[list[tuple[int, Vector, Vector | None]]] = [[] for _ in problem.costs]  # other, [other, own]
        for edge in problem.edges:
            if edge.i == edge.j:
                self.costs[edge.i] = self.costs[edge.i] + edge.matrix.diagonal()
                if edge.hidden is not None:
                    self.rest[edge.i] = self.rest[edge.i] + edge.hidden.diagonal()
            else:
                self.around[edge.i].append((edge.j, edge.matrix.T, None if edge.hidden is None else edge.hidden.T))
                self.around[edge.j].append((edge.i, edge.matrix, edge.hidden))

    def seconds(self, node: int, choice: Sequence[int]) -> Vector:
        """The seconds of each candidate but those that may be hidden; only neighbours in `choice`, which may end early,
        count."""
        total = self.costs[node]
        for other, matrix, _ in self.around[node]:
            if other < len(choice):
                total = total + matrix[choice[other]]
        return total

    def beside(self, node: int, choice: Sequence[int]) -> Vector:
        """The seconds of each candidate that may be hidden, less its room."""
        total = self.rest[node]
        for other, _, hidden in self.around[node]:
            if hidden is not None:
                total = total + hidden[choice[other]]
        return total

    def improved(self, problem: Problem, choice: Sequence[int], limit: float) -> tuple[int, ...]:
        """A choice no dearer that fits in `limit` bytes: nodes tied to none take what is better, one by one."""
        found, held, beside = list(choice), problem.bytes(choice), problem.beside(choice)
        hides = bool(problem.room) or any(edge.hidden is not None for edge in problem.edges)
        loose = [n for n in range(len(found)) if not problem.tied or problem.tied[n] < 0]
        for _ in range(5):
            before = list(found)
            for n in loose:
                own, seconds = found[n], self.seconds(n, found)
                rest = np.zeros(len(seconds))
                if hides:
                    rest = self.beside(n, found)
                    rest = beside + rest - rest[own]
                    seconds = seconds + np.maximum(rest, 0.0)
                if problem.memory:
                    memory = problem.memory[n]
                    seconds = np.where(held - memory[own] + memory <= limit, seconds, np.inf)
                at = int(seconds.argmin())
                if seconds[at] < seconds[own]:
                    held += float(problem.memory[n][at] - problem.memory[n][own]) if problem.memory else 0.0
                    beside = float(rest[at])
                    found[n] = at
            if found == before:
                break
        return tuple(found)


def greedy(problem: Problem) -> tuple[int, ...]:
    """The choice in which each node in order takes what is cheapest after those before it; it may end forbidden."""
    nearby = Nearby(problem)
    choice: list[int] = []
    for node, cost in enumerate(problem.costs):
        choice.append(int(nearby.seconds(node, choice).argmin()) if len(cost) > 1 else 0)
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
