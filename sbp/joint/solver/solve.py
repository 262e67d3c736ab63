"""Solving: all signatures of a graph at the least cost together, with a bound that proves it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Literal

import numpy as np

from ..problem import Problem, Vector
from .best import Method, best, best_of
from .fold import fold
from .local_search import greedy
from .measured import Measured, measured
from .search import BRANCHES, Near, Search

__all__ = ["RunnerUp", "Solution", "Solver", "solve"]


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A choice for every node and its seconds."""

    choice: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Solution:
    """The plan that was found, and how good it is. Equal problems give equal solutions in every process.

    `bound` holds for plans in which tied nodes choose alike: none of them that fits costs less. It equals `cost` where
    the choice is proven. It says nothing about plans that break the ties.
    """

    choice: tuple[int, ...]  # the candidate of each node; () if no plan is allowed, or none fits
    cost: float  # seconds
    bound: float
    greedy: (
        float  # seconds where each node in turn takes what is cheapest after those before it; inf if that ends badly
    )
    method: Method | Literal["greedy"]  # how `choice` was found
    memory: float  # bytes
    fits: bool  # in the limit of memory
    least: float  # bytes of the plan that needs least, where a limit made it worth asking; else those of this plan
    runner_up: RunnerUp | None  # the next best
    seconds: float  # that solving took
    near: Near | None = None  # where the search for it ended

    @property
    def share(self) -> float:
        """The share of what is hidden that is paid for where the bound is highest."""
        return self.near.at.share if self.near else 0.0

    @property
    def gap(self) -> float:
        """The share of the cost that a better plan could save at most."""
        return max(0.0, self.cost - self.bound) / abs(self.cost) if self.choice and self.cost else 0.0


def solve(
    problem: Problem,
    *,
    limit: float | None = None,
    table: int = 3 * 10**7,
    wide: Method | None = None,
    branches: int = BRANCHES,
) -> Solution:
    """The best plan of at most `limit` bytes; exact while no table on the way passes `table` cells.

    Wider graphs go to HiGHS where scipy is installed, else to bounds (`wide` says which; "elimination" is exact however
    long it takes). If the plan that is best where nothing hidden costs has room for all of it, and fits, it is the
    best, and the runner-up is the second-best of all plans that keep the ties where tables stayed small. Else all
    shares of what is hidden and all prices of a byte are searched; `bound` says how far the best can be, and the
    runner-up is the next best that was met. Where that bound is not near, so many `branches` are looked at.
    """
    return Solver(problem, table=table, wide=wide).solve(problem.memory, limit, branches=branches)


class Solver:
    """Solves a problem for one account of bytes after another; work that does not depend on bytes is done once."""

    def __init__(self, problem: Problem, *, table: int = 3 * 10**7, wide: Method | None = None) -> None:
        start = perf_counter()
        self.problem = problem
        self.folded = fold(problem.priced(0.0))
        self.free = best(self.folded.costs, self.folded.tables, table=table, wide=wide)
        self.greedy = greedy(problem.priced(1.0))
        self.looked = lambda model: best_of(model, table=table, wide=wide)
        self.seconds = perf_counter() - start

    @cached_property
    def whole(self) -> Measured:
        return measured(self.problem, self.folded)

    def solve(
        self,
        memory: Sequence[Vector],
        limit: float | None,
        *,
        branches: int = BRANCHES,
        near: Near | None = None,
        level: float = np.inf,
    ) -> Solution:
        """The best plan where nodes take these bytes; `near` is where a search ended, to look there first. Where no
        plan takes less than `level` seconds, one that takes more will do."""
        start = perf_counter() - self.seconds
        problem, free = replace(self.problem, memory=tuple(memory)), self.free
        bound, ended = free.bound, None
        plans: list[tuple[int, ...]] = []
        least = 0.0
        if free.choice or not self.folded.costs:
            plan = self.folded.expand(free.choice)
            least = problem.bytes(plan)
            if (limit is None or least <= limit) and problem.beside(plan) <= 0:
                plans = [plan, *([self.folded.expand(free.second)] if free.second else [])]
                if free.bound >= free.value:
                    bound = problem.cost(plan)  # the same but for rounding
            else:
                whole = self.whole.holding(self.folded.sums(memory))
                search = Search(problem, whole, limit, self.folded.expand, self.looked, branches, level)
                found = search.run(free, near)
                plans, bound, least, ended = list(found.plans), found.bound, found.least, found.near
        return self.chosen(problem, plans, bound, limit, least, ended, perf_counter() - start)

    def chosen(
        self,
        problem: Problem,
        plans: list[tuple[int, ...]],
        bound: float,
        limit: float | None,
        least: float,
        near: Near | None,
        seconds: float,
    ) -> Solution:
        """The cheapest of these plans and the greedy one. The greedy one is cheaper only by rounding, or where breaking
        a tie pays."""
        known = self.greedy
        plans = [*plans, known]
        costs = {each: problem.cost(each) for each in plans if limit is None or problem.bytes(each) <= limit}
        ranked = sorted(
            (each for each in costs if costs[each] < np.inf), key=lambda each: (costs[each], plans.index(each))
        )
        first = problem.cost(known)
        if not ranked:
            return Solution((), np.inf, bound, first, self.free.method, 0.0, False, least, None, seconds)
        chosen = ranked[0]
        return Solution(
            choice=chosen,
            cost=costs[chosen],
            bound=min(bound, costs[chosen]),
            greedy=first,
            method="greedy" if chosen == known and known not in plans[:-1] else self.free.method,
            memory=problem.bytes(chosen),
            fits=True,
            least=least,
            runner_up=RunnerUp(ranked[1], costs[ranked[1]]) if len(ranked) > 1 else None,
            seconds=seconds,
            near=near,
        )
