"""Presolve: exact decisions before anything large is built.

A candidate goes when another is never worse, whatever the neighbours choose (dead-end elimination), and a node goes
when it has at most two neighbours, which then share a table of its costs to them. Both repeat until nothing changes.
Every step keeps the tables that it read, so that reading the steps backwards gives the nodes' choices.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..problem import Ints, Vector
from .table import Table, added, best_over, dense, refined, sizes

__all__ = ["LiveMask", "Model", "Elimination", "presolve"]

LiveMask: TypeAlias = npt.NDArray[np.bool_]
QUICK = 1 << 17  # cells at which a node is eliminated before candidates are compared
PAIRS = 1 << 21  # cells of a temporary in which pairs of candidates are compared
WIDE = 1 << 17  # cells of a table above which comparing candidates costs more than it saves


@dataclass(frozen=True, eq=False)
class Elimination:
    """A node is eliminated, or these candidates of it are dropped: with all that this depended on."""

    node: int
    candidates: Ints
    cost: Vector
    tables: tuple[Table, ...]
    eliminated: bool

    def seconds(self, choice: Mapping[int, int]) -> Vector:
        """The seconds of each candidate, once the others' choice is known; up to a constant."""
        total = self.cost[self.candidates]
        for table in self.tables:
            total = total + table.at(self.node, self.candidates, choice)
        return total


class Model:
    """Choices that are left: nodes, their live candidates and the tables between them.

    With `memory` every step is right at every price of a byte: candidates are dropped for others that hold no more, and
    a node is eliminated only if all its candidates hold as much; `held` is the sum of what these hold.
    """

    def __init__(self, costs: Sequence[Vector], tables: Sequence[Table], memory: Sequence[Vector] = ()) -> None:
        self.memory, self.held = list(memory), 0.0
        self.costs = [np.asarray(cost, dtype=np.float64) for cost in costs]
        self.lives: list[Ints] = [np.flatnonzero(np.isfinite(cost)) for cost in self.costs]
        self.around: list[dict[int, Table]] = [{} for _ in costs]  # the tables of a node, by number
        self.numbers = count()
        self.left = dict.fromkeys(range(len(costs)))
        self.constant = 0.0
        self.steps: list[Elimination] = []
        self.changed = deque(self.left)  # nodes whose candidates are to be compared again
        self.waiting = [True] * len(costs)
        self.fresh = list(self.left)  # nodes around which something is new since someone looked
        for table in tables:
            self.add(table)
        if not all(map(len, self.lives)):
            self.constant = np.inf

    @property
    def dead(self) -> bool:
        """Whether every choice is forbidden."""
        return bool(np.isinf(self.constant))

    def copy(self) -> "Model":
        """The same with no steps behind it."""
        other = Model(self.costs, ())
        other.lives = list(self.lives)
        other.around = [dict(tables) for tables in self.around]
        other.numbers = count(max((number for tables in self.around for number in tables), default=-1) + 1)
        other.left, other.constant = dict(self.left), self.constant
        other.changed, other.waiting, other.fresh = deque(), [False] * len(self.costs), []
        return other

    def priced(self, price: float) -> "Model":
        """The same at one price of a byte, with all steps behind it."""
        other = self.copy()
        other.steps = list(self.steps)
        other.constant += price * self.held
        for n in other.left:
            other.costs[n] = other.costs[n] + price * self.memory[n]
            other.touch(n)
        return other

    def loose(self, node: int) -> bool:
        """Whether it does not matter for memory what a node takes."""
        held = self.memory[node][self.lives[node]] if self.memory else ()
        return len(held) == 0 or bool(np.ptp(held) == 0)

    def add(self, table: Table) -> None:
        """Take up a table over one node or many."""
        nodes = table.nodes
        if not nodes:
            self.constant += float(table.values)
        elif len(nodes) == 1:
            self.costs[nodes[0]] = self.costs[nodes[0]] + table.values[table.classes[0]]
        else:
            for number, old in list(self.around[nodes[0]].items()):
                if old.nodes == nodes and (both := added(old, table, self.lives)) is not None:
                    table = both
                    for n in nodes:
                        del self.around[n][number]
            number = next(self.numbers)
            for n in nodes:
                self.around[n][number] = table
        for n in nodes:
            self.touch(n)

    def touch(self, node: int) -> None:
        """Its candidates are to be compared again."""
        self.fresh.append(node)
        if not self.waiting[node]:
            self.waiting[node] = True
            self.changed.append(node)

    def neighbours(self, node: int) -> list[int]:
        """Those that share a table with it, ascending."""
        return sorted({n for table in self.around[node].values() for n in table.nodes} - {node})

    def value(self, choice: Mapping[int, int]) -> float:
        """Seconds of a choice for the nodes that are left."""
        total = self.constant + sum(float(self.costs[n][choice[n]]) for n in self.left)
        return total + sum(table.value(choice) for table in self.among(self.left))

    def among(self, nodes: Iterable[int]) -> list[Table]:
        """The tables of these nodes, each once."""
        return list({number: table for n in nodes for number, table in self.around[n].items()}.values())

    def eliminate(self, node: int) -> None:
        """Let a node take what is best for each choice of its neighbours."""
        tables = tuple(self.around[node].values())
        cost, live = self.costs[node], self.lives[node]
        self.steps.append(Elimination(node, live, cost, tables, eliminated=True))
        self.remove(node)
        if self.memory:
            self.held += float(self.memory[node][live[0]])
        if not tables or len(live) == 1:  # nothing left to choose, so its neighbours need not meet in one table
            self.constant += float(cost[live].min())
            for table in tables:
                self.add(best_over(node, np.zeros_like(cost), (table,), self.lives))
        else:
            self.add(best_over(node, cost, tables, self.lives))

    def remove(self, node: int) -> None:
        """Forget a node and its tables."""
        for number, table in self.around[node].items():
            for n in table.nodes:
                if n != node:
                    del self.around[n][number]
                    self.fresh.append(n)
        self.around[node] = {}
        del self.left[node]

    def compare(self) -> None:
        """Drop what is never better, until nothing changes."""
        while self.changed and not self.dead:
            node = self.changed.popleft()
            self.waiting[node] = False
            if node not in self.left:
                continue
            live = self.lives[node]
            cells = sum(table.values.size for table in self.around[node].values())
            keep = _undominated(node, self) if cells <= WIDE else np.isfinite(self.costs[node][live])
            if keep.all():
                if len(live) == 1:
                    self.eliminate(node)
                continue
            tables = tuple(self.around[node].values())
            self.steps.append(Elimination(node, live[~keep], self.costs[node], tables, eliminated=False))
            self.lives[node] = live[keep]
            for n in self.neighbours(node):
                self.touch(n)
            if not keep.any():
                self.constant = np.inf
            elif keep.sum() == 1:
                self.eliminate(node)


def presolve(model: Model) -> None:
    """Drop candidates and eliminate nodes of at most two neighbours, those of least work first, to a fixed point.

    Nodes that are eliminated at little work go before anything is compared: comparing their candidates, and those of
    their neighbours again each time that something around them changes, takes several times as long.
    """
    queue: list[tuple[int, int]] = []
    while not model.dead:
        for node in model.fresh:
            if node in model.left and (cells := _work(model, node)) is not None:
                heapq.heappush(queue, (cells, node))
        model.fresh.clear()
        while queue and queue[0][1] not in model.left:
            heapq.heappop(queue)
        if model.changed and not (queue and queue[0][0] <= QUICK):
            model.compare()
            continue
        if not queue:
            return
        known, node = heapq.heappop(queue)
        cells = _work(model, node)
        assert cells is not None  # neither the number of neighbours nor what candidates hold grows here
        if cells > known:
            heapq.heappush(queue, (cells, node))
        else:
            model.eliminate(node)


def _work(model: Model, node: int) -> int | None:
    """The cells to be looked at when eliminating a node of at most two neighbours."""
    if not model.loose(node):
        return None
    found = sizes(node, tuple(model.around[node].values()), model.lives)
    return prod(found.values()) * len(model.lives[node]) if len(found) <= 2 else None


def _undominated(node: int, model: Model) -> LiveMask:
    """The live candidates of a node that are to stay.

    r goes if for some t: cost[t] - cost[r] + sum over tables of max(table[t] - table[r]) <= 0, and t holds no more. The
    first of equals stays. Two entries of each table refute most pairs at no expense (`TableView.apart`).
    """
    live = model.lives[node]
    cost = model.costs[node][live]
    keep = np.isfinite(cost)
    looks = [table.view(node, model.lives) for table in model.around[node].values()]
    for view in looks:
        keep &= view.allowed[view.mine]  # else forbidden whatever the others choose
    alive = np.flatnonzero(keep)
    held = model.memory[node][live] if model.memory else np.zeros(len(live))
    if looks and len(alive):
        alike = [view.mine[alive] for view in looks]
        if model.memory:
            alike.append(np.unique(held[alive], return_inverse=True)[1].reshape(-1))
        first, group = refined(alike)
        order = np.lexsort((cost[alive], group))[::-1]
        first[group[order]] = order  # the last that is written is the cheapest
        alive = np.sort(alive[first])
    better = cost[alive][None, :] - cost[alive][:, None]  # [r, t]
    better[held[alive][None, :] > held[alive][:, None]] = np.inf
    least = better.copy()
    with np.errstate(invalid="ignore"):  # inf - inf: forbidden for both, so no reason against t
        for view in looks:
            at = view.mine[alive]
            least += view.apart[at[:, None], at]
        np.fill_diagonal(least, np.inf)
        r, t = np.nonzero(least <= 0)
        total = better[r, t]
        for view in looks:
            total = total + _worst(view.rows, view.mine[alive[r]], view.mine[alive[t]])
    beaten = np.zeros(better.shape, dtype=bool)
    beaten[r, t] = total <= 0
    stays = np.ones(len(alive), dtype=bool)
    for k in np.flatnonzero(beaten.any(axis=1))[::-1]:
        stays[k] = not (beaten[k] & stays).any()
    keep[:] = False
    keep[alive[stays]] = True
    return keep


def _worst(rows: Vector, r: Ints, t: Ints) -> Vector:
    """For pairs of rows, the most by which t may cost more than r."""
    pairs, inverse = dense(r * len(rows) + t)
    r, t = pairs // len(rows), pairs % len(rows)
    found = np.empty(len(pairs))
    step = max(1, PAIRS // rows.shape[1])
    for lo in range(0, len(pairs), step):
        found[lo : lo + step] = np.fmax.reduce(rows[t[lo : lo + step]] - rows[r[lo : lo + step]], axis=1)
    worst: Vector = found[inverse]
    return worst
