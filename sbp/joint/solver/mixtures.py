"""Mixtures: the best plan whose blocks up to one take the candidates of one plan, and all others those of a second.

Equal blocks are the change between two plans of which one has too much, bytes or seconds that nothing hides, and the
other costs more.
"""

from collections.abc import Sequence

import numpy as np

from ..problem import Ints, Problem, Vector

__all__ = ["mixture"]


def mixture(problem: Problem, early: Sequence[int], late: Sequence[int], limit: float) -> tuple[int, ...] | None:
    """The cheapest plan that fits where the first few blocks choose as `early` does and all others as `late`, if any.

    All numbers of blocks are priced at once: each node and edge adds its change where its blocks turn.
    """
    place = _places(problem)
    count = int(place.max(initial=-1)) + 2  # how many blocks take `early`: none, one, ... all
    seconds, beside, held = _Turns(count), _Turns(count), _Turns(count)
    for n, (a, b) in enumerate(zip(early, late, strict=True)):
        seconds.node(place[n], problem.costs[n], a, b)
        if problem.memory:
            held.node(place[n], problem.memory[n], a, b)
        if problem.room:
            beside.node(place[n], -problem.room[n], a, b)
    for edge in problem.edges:
        i, j = edge.i, edge.j
        ends = place[i], place[j], early[i], early[j], late[i], late[j]
        seconds.edge(edge.matrix, *ends)
        if edge.hidden is not None:
            beside.edge(edge.hidden, *ends)
    total = seconds.along() + np.maximum(0.0, beside.along())
    total[held.along() > limit] = np.inf
    best = int(total.argmin())
    return None if np.isinf(total[best]) else tuple(np.where(place < best, early, late).tolist())


class _Turns:
    """A sum over nodes and edges for each number of blocks that take the first plan."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.where: list[int] = []  # from this many blocks on ...
        self.change: list[float] = []  # ... so much more, perhaps inf

    def node(self, place: int, values: Vector, a: int, b: int) -> None:
        if a == b:
            self.where.append(0)
            self.change.append(values[b])
        else:
            self.where += [0, place + 1, place + 1]
            self.change += [values[b], values[a], -values[b]]

    def edge(self, m: Vector, i: int, j: int, a: int, b: int, c: int, d: int) -> None:
        """Add an edge of blocks i and j. Its nodes take a, b in the first plan, c, d in the second."""
        if a == c and b == d:
            self.where.append(0)
            self.change.append(m[a, b])
            return
        one, both = sorted((i + 1, j + 1))
        half = m[a, d] if i < j else m[c, b]
        self.where += [0, one, one, both, both]
        self.change += [m[c, d], half, -m[c, d], m[a, b], -half]

    def along(self) -> Vector:
        at, by = np.array(self.where, dtype=np.intp), np.array(self.change, dtype=np.float64)
        forbids = np.isinf(by)
        total: Vector = np.bincount(at, np.where(forbids, 0.0, by), self.count).cumsum().astype(np.float64)
        forbidden = np.bincount(at, np.where(forbids, np.sign(by), 0.0), self.count).cumsum()
        total[forbidden > 0] = np.inf
        return total


def _places(problem: Problem) -> Ints:
    """The place of each node's block among all blocks; a node in no block is one of its own."""
    blocks: dict[tuple[str, int], int] = {}
    seen: dict[int, int] = {}
    place = []
    for n in range(len(problem.costs)):
        number = problem.tied[n] if problem.tied else -1
        if problem.block:
            key = ("block", problem.block[n]) if problem.block[n] >= 0 else ("node", n)
        elif number >= 0:
            key = ("block", seen.setdefault(number, 0))
            seen[number] += 1
        else:
            key = ("node", n)
        place.append(blocks.setdefault(key, len(blocks)))
    return np.array(place, dtype=np.intp)
