"""Messages tell neighbours what a node would cost them, along the graph and back until a bound stands close below a
plan. A candidate that no plan as good can have is dropped.

Tree-reweighted message passing in the order of the nodes: a node's costs, its own and those that all tables tell it,
are shared among the monotonic chains that go through it. The bound never falls. The difference between a candidate and
the best of its node can be added to it, because every chain would cost so much more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..problem import Ints, Vector
from .presolve import Elimination, Model
from .table import Table

__all__ = ["FEW", "above", "narrowed"]

PASSES = 60
FEW = 12  # after which little more is dropped
LOOKS = 6  # passes between two plans
STILL = 1e-4  # share of the distance to the plan that some passes have to win
NEAR = 1e-9  # share of the cost by which candidates may be above the plan and stay
_LEAST = np.minimum  # `min` calls its `reduce`; called directly, that takes half the time where rows are short


class _Side(NamedTuple):
    """One node of a table: the row of each of its live candidates, and these sorted by row."""

    node: int
    mine: Ints
    order: Ints
    starts: Ints
    alone: bool  # whether each candidate has the row of its own number


class _Pair:
    """A table of two nodes among live candidates, and the message to either."""

    def __init__(self, table: Table, model: Model, big: float) -> None:
        values, sides = table.values, []
        for axis, n in enumerate(table.nodes):
            used, inverse = np.unique(table.classes[axis][model.lives[n]], return_inverse=True)
            values, mine = values.take(used, axis), inverse.reshape(-1)
            order = np.argsort(mine, kind="stable")
            starts = np.searchsorted(mine[order], np.arange(len(used)))
            alone = bool(len(mine) == len(used) and (mine == np.arange(len(used))).all())
            sides.append(_Side(n, mine, order, starts, alone))
        self.sides = sides
        self.values = [np.minimum(values, big), np.ascontiguousarray(np.minimum(values, big).T)]
        self.told = [np.zeros(len(side.starts)) for side in sides]

    def send(self, at: int, costs: Vector) -> float:
        """Send a message from side `at`, whose candidates cost so; returned is what the message was lowered by."""
        side = self.sides[at]
        rows = costs if side.alone else _LEAST.reduceat(costs.take(side.order), side.starts)
        rows = rows - self.told[at]
        told = _LEAST.reduce(self.values[at] + rows[:, None], axis=0)
        low = float(_LEAST.reduce(told))
        self.told[1 - at] = told - low
        return low


class _Chains:
    def __init__(self, model: Model, part: Sequence[int]) -> None:
        tables = model.among(part)
        finite = [np.abs(v[np.isfinite(v)]).max(initial=0.0) for v in (*(t.values for t in tables),)]
        self.big = 4 * float(sum(finite) + sum(np.abs(model.costs[n][model.lives[n]]).max() for n in part))
        self.model, self.part = model, list(part)
        self.costs = {n: model.costs[n][model.lives[n]] for n in part}
        self.pairs = [_Pair(table, model, self.big) for table in tables]
        self.around: dict[int, list[tuple[_Pair, int]]] = {n: [] for n in part}
        for pair in self.pairs:
            for at, side in enumerate(pair.sides):
                self.around[side.node].append((pair, at))
        self.place = {n: k for k, n in enumerate(self.part)}
        self.share = {}
        self.before: dict[int, list[tuple[_Pair, int]]] = {}  # those to nodes before each, and behind it
        self.behind: dict[int, list[tuple[_Pair, int]]] = {}
        for n in part:
            mine, place = self.around[n], self.place[n]
            self.before[n] = [(pair, at) for pair, at in mine if self.place[pair.sides[1 - at].node] < place]
            self.behind[n] = [(pair, at) for pair, at in mine if self.place[pair.sides[1 - at].node] > place]
            self.share[n] = 1 / max(1, len(self.before[n]), len(self.behind[n]))

    def seen(self, n: int) -> Vector:
        """Costs of each candidate, with all that its node was told."""
        total = self.costs[n]
        for pair, at in self.around[n]:
            told, side = pair.told[at], pair.sides[at]
            total = total + (told if side.alone else told.take(side.mine))
        return total

    def sweep(self, forward: bool, more: dict[int, Vector] | None = None) -> float:
        """Send everything one way; the bound, and in `more` by how much each candidate is above its node's best."""
        bound = 0.0
        ahead = self.behind if forward else self.before
        for n in self.part if forward else reversed(self.part):
            seen = self.seen(n)
            low = float(_LEAST.reduce(seen))
            bound += low
            seen = seen - low
            if more is not None:
                more[n] = seen
            mine = self.share[n] * seen
            for pair, at in ahead[n]:
                bound += pair.send(at, mine)
        return bound

    def settled(self, passes: int) -> tuple[float, dict[int, int] | None]:
        """Send until the bound stands close below a plan or moves no more; that plan and what it costs."""
        best, plan, bound = np.inf, None, -np.inf
        for turn in range(passes):
            self.sweep(True)
            now = self.sweep(False)
            if turn % LOOKS == LOOKS - 1 or now >= best * (1 - NEAR):
                choice, value = self.plan()
                if value < best:
                    best, plan = value, choice
                if best - now <= NEAR * abs(best) or now - bound <= STILL * max(best - now, 0.0):
                    break
                bound = now
        return best, plan

    def above(self) -> tuple[float, dict[int, Vector]]:
        """The bound, and by how much each live candidate is above it at least."""
        more: dict[int, Vector] = {}
        low = self.sweep(True)
        self.sweep(False, more)
        return low, more

    def plan(self) -> tuple[dict[int, int], float]:
        """Each node in turn takes what is best after those before it, told of those behind; then one by one."""
        taken: dict[int, int] = {}

        def seen(n: int) -> Vector:
            total = self.costs[n]
            for pair, at in self.around[n]:
                other = pair.sides[1 - at]
                if other.node in taken:
                    total = total + pair.values[1 - at][other.mine[taken[other.node]]][pair.sides[at].mine]
                else:
                    total = total + pair.told[at][pair.sides[at].mine]
            return total

        for n in self.part:
            taken[n] = int(seen(n).argmin())
        for _ in range(4):
            before = dict(taken)
            for n in self.part:
                taken[n] = int(seen(n).argmin())
            if taken == before:
                break
        choice = {n: int(self.model.lives[n][k]) for n, k in taken.items()}
        value = sum(float(self.costs[n][k]) for n, k in taken.items())
        return choice, value + sum(table.value(choice) for table in self.model.among(self.part))


def narrowed(model: Model, part: Sequence[int], passes: int = PASSES) -> dict[int, int] | None:
    """Drop candidates that no plan as good as the best found has; return that plan, or None if there is none.

    All tables between these nodes are of two."""
    chains = _Chains(model, part)
    best, plan = chains.settled(passes)
    if plan is None:
        return None
    low, more = chains.above()
    level = best - low + NEAR * abs(best) + 1e-12 * chains.big
    for n, above in more.items():
        keep = above <= level
        if not keep.all():
            live = model.lives[n]
            model.steps.append(
                Elimination(n, live[~keep], model.costs[n], tuple(model.around[n].values()), eliminated=False)
            )
            model.lives[n] = live[keep]
            model.touch(n)
            for other in model.neighbours(n):
                model.touch(other)
    return plan


def above(model: Model, part: Sequence[int]) -> tuple[float, dict[int, Vector]]:
    """A lower bound of all choices for these nodes, and how much more each live candidate costs at least. All tables
    between these nodes are of two."""
    chains = _Chains(model, part)
    chains.settled(FEW)
    low, more = chains.above()
    return low - 1e-12 * chains.big, more
