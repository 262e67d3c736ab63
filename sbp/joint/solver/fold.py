"""Folding: nodes that are to choose alike become one variable, so that a hundred equal blocks cost as much as one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem import Ints, Problem, Vector
from .table import Table, pair

__all__ = ["Folded", "fold"]


@dataclass(frozen=True, eq=False)
class Folded:
    """A smaller problem with the same costs for every choice that keeps the ties."""

    variable: Ints  # of each node
    costs: tuple[Vector, ...]
    memory: tuple[Vector, ...]
    tables: tuple[Table, ...]  # at most one for two variables

    def sums(self, vectors: Sequence[Vector]) -> tuple[Vector, ...]:
        """For each variable, the sum over its nodes."""
        return tuple(_sums(vectors, self.variable.tolist()))

    def expand(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice for every node, from one for every variable."""
        return tuple(np.asarray(choice, dtype=np.intp)[self.variable].tolist()) if len(self.variable) else ()

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of a choice."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.costs, choice, strict=True))
        return nodes + sum(table.value(choice) for table in self.tables)

    def bytes(self, choice: Sequence[int]) -> float:
        """Bytes of a choice."""
        return sum(float(held[k]) for held, k in zip(self.memory, choice, strict=False))


def fold(problem: Problem) -> Folded:
    """Add up what equal blocks have in common: an object that occurs a hundred times is read once."""
    variable, first = _variables(problem)
    costs = _sums(problem.costs, variable)
    between: dict[tuple[int, int], dict[tuple[int, bool], tuple[int, Vector]]] = {}
    for edge in problem.edges:
        i, j = variable[edge.i], variable[edge.j]
        turned = i > j
        same = between.setdefault((j, i) if turned else (i, j), {})
        # Keyed by identity, read in the order of the edges: no address decides anything.
        count, matrix = same.get((id(edge.matrix), turned), (0, edge.matrix))
        same[id(edge.matrix), turned] = count + 1, matrix
    tables = []
    for (i, j), same in between.items():
        total = np.zeros((len(costs[i]), len(costs[j])))
        for (_, turned), (count, matrix) in same.items():
            matrix = matrix.T if turned else matrix
            assert matrix.shape == total.shape, (first[i], first[j], matrix.shape, total.shape)
            total = total + (matrix if count == 1 else count * matrix)
        assert not np.isnan(total).any(), (first[i], first[j])
        if i == j:  # both ends choose alike
            costs[i] = costs[i] + total.diagonal()
        elif len(costs[i]) == 1:  # nothing is chosen there, as everywhere on one rank
            costs[j] = costs[j] + total[0]
        elif len(costs[j]) == 1:
            costs[i] = costs[i] + total[:, 0]
        else:
            tables.append(pair(i, j, total))
    return Folded(
        np.array(variable, dtype=np.intp), tuple(costs), tuple(_sums(problem.memory, variable)), tuple(tables)
    )


def _variables(problem: Problem) -> tuple[list[int], list[int]]:
    """The variable of each node, numbered as they come, and the first node of each."""
    assert len(problem.tied) in (0, len(problem.costs)), len(problem.tied)
    assert len(problem.memory) in (0, len(problem.costs)), len(problem.memory)
    numbers: dict[int, int] = {}
    variable: list[int] = []
    first: list[int] = []
    for node in range(len(problem.costs)):
        number = problem.tied[node] if problem.tied else -1
        mine = numbers.setdefault(number, len(first)) if number >= 0 else len(first)
        if mine == len(first):
            first.append(node)
        assert len(problem.costs[node]) == len(problem.costs[first[mine]]), (node, first[mine])
        variable.append(mine)
    return variable, first


def _sums(vectors: Sequence[Vector], variable: Sequence[int]) -> list[Vector]:
    """For each variable, the sum over its nodes."""
    mine: dict[int, dict[int, tuple[int, Vector]]] = {}
    for v, vector in zip(variable, vectors, strict=False):
        same = mine.setdefault(v, {})
        count, _ = same.get(id(vector), (0, vector))
        same[id(vector)] = count + 1, vector
    totals = []
    for same in mine.values():
        total = sum((count * vector for count, vector in same.values()), start=np.zeros(()))
        assert not np.isnan(total).any()
        totals.append(np.asarray(total, dtype=np.float64))
    return totals
