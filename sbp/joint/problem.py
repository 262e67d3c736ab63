"""The problem of choosing jointly: nodes that each take one of several candidates, and what neighbours' choices cost.

cost(choice) = sum of node[i][choice_i] + sum over edges (i, j) of matrix[choice_i, choice_j]

in seconds; memory(choice) = sum of memory[i][choice_i] in bytes. `inf` forbids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Edge", "Ints", "Problem", "Vector"]

Vector: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Edge:
    """What the choices of two nodes cost together; many edges may share one matrix object."""

    i: int
    j: int
    matrix: Vector  # [candidates of i, candidates of j]


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes of one number in `tied` are to choose alike, as those of repeated blocks; -1 is tied to none.

    `block` says in which of the repeated blocks a node lies, -1 in none: where memory is short, whole blocks choose
    differently. Without it, the k-th node of each number in `tied` lies in the k-th block.
    """

    costs: tuple[Vector, ...]
    edges: tuple[Edge, ...]
    memory: tuple[Vector, ...] = ()  # one for each node, or none at all
    tied: Sequence[int] = field(default=())
    block: Sequence[int] = field(default=())

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of a choice."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.costs, choice, strict=True))
        return nodes + sum(float(e.matrix[choice[e.i], choice[e.j]]) for e in self.edges)

    def bytes(self, choice: Sequence[int]) -> float:
        """Bytes of a choice."""
        return sum(float(held[k]) for held, k in zip(self.memory, choice, strict=False))

    def without(self, node: int, candidate: int) -> "Problem":
        """The same, where this node and those tied to it may not take this candidate."""
        number = self.tied[node] if self.tied else -1
        alike = [n for n, other in enumerate(self.tied) if other == number] if number >= 0 else [node]
        costs = list(self.costs)
        for n in alike:
            costs[n] = costs[n].copy()
            costs[n][candidate] = np.inf
        return replace(self, costs=tuple(costs))
