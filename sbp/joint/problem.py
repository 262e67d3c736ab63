"""The problem of choosing jointly: nodes that each take one of several candidates, with costs between neighbours.

cost(choice) = sum of node[i][choice_i] + sum over edges (i, j) of matrix[choice_i, choice_j]
               + what of the hidden[choice_i, choice_j] is more than the sum of room[i][choice_i]

in seconds: moves that may go on beside the computing cost only the seconds that there is no room for.

memory(choice) = sum of memory[i][choice_i] in bytes. `inf` forbids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Edge", "Ints", "Problem", "Vector", "rooms"]

Vector: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Edge:
    """The cost of two nodes' choices together; many edges may share one matrix object."""

    i: int
    j: int
    matrix: Vector  # [candidates of i, candidates of j]
    hidden: Vector | None = None  # as large, for moves that go on beside the computing


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes of one number in `tied` are to choose alike, such as those of repeated blocks; -1 is tied to none.

    `block` says in which of the repeated blocks a node lies, -1 in none: where memory is short, whole blocks choose
    differently. Without it, the k-th node of each number in `tied` lies in the k-th block.
    """

    costs: tuple[Vector, ...]
    edges: tuple[Edge, ...]
    memory: tuple[Vector, ...] = ()  # one for each node, or none at all
    tied: Sequence[int] = field(default=())
    block: Sequence[int] = field(default=())
    room: tuple[Vector, ...] = ()  # one for each node, no more than its cost; or none at all

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds of a choice."""
        nodes = sum(float(cost[k]) for cost, k in zip(self.costs, choice, strict=True))
        edges = sum(float(e.matrix[choice[e.i], choice[e.j]]) for e in self.edges)
        return nodes + edges + max(0.0, self.beside(choice))

    def hides(self, choice: Sequence[int]) -> float:
        """Seconds of moves that may go on beside the computing."""
        return sum(float(e.hidden[choice[e.i], choice[e.j]]) for e in self.edges if e.hidden is not None)

    def beside(self, choice: Sequence[int]) -> float:
        """By how many seconds these are more than there is room for, or less if negative."""
        return self.hides(choice) - sum(float(room[k]) for room, k in zip(self.room, choice, strict=False))

    def priced(self, share: float) -> "Problem":
        """The problem in which this share of what is hidden costs, and room is worth as much.

        With a share between 0 and 1 no choice costs more in it.
        """
        made: dict[tuple[int, int], Vector] = {}

        def mixed(one: Vector, other: Vector, times: float) -> Vector:
            key = id(one), id(other)
            if key not in made:
                made[key] = one + times * other if times else one
            return made[key]

        edges = [e if e.hidden is None else Edge(e.i, e.j, mixed(e.matrix, e.hidden, share)) for e in self.edges]
        costs = self.costs
        if self.room:
            costs = tuple(mixed(cost, room, -share) for cost, room in zip(self.costs, self.room, strict=True))
        return replace(self, costs=costs, edges=tuple(edges), room=())

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


def rooms(edges: Sequence[Edge], nodes: Sequence[tuple[Vector, bool]]) -> tuple[Vector, ...]:
    """The room of nodes, of these costs: all of it where something moves beside them, else nothing; none if nothing is
    hidden. What is forbidden has none, because infinite room is no number. Equal costs have one object."""
    if not any(edge.hidden is not None for edge in edges):
        return ()
    known = {id(cost): cost for cost, _ in nodes}
    found = {at: (np.zeros_like(cost), np.where(np.isfinite(cost), cost, 0.0)) for at, cost in known.items()}
    return tuple(found[id(cost)][beside] for cost, beside in nodes)
