"""Solving: all signatures of a graph at the least cost together, with a bound that proves it."""

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np

from .best import Method, best, best_of
from .fold import fold
from .measured import measured
from .nearby import greedy
from .problem import Problem
from .search import BRANCHES, Search

__all__ = ["Plan", "Solution", "solve"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice for every node and its seconds."""

    choice: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True)
class Solution:
    """What was found, and how good that is. Equal problems give equal solutions in every process.

    `bound` holds for plans in which tied nodes choose alike: none of them that fits costs less. It equals `cost` where
    the choice is proven; of plans that break the ties it says nothing.
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
    runner_up: Plan | None  # the next best
    seconds: float  # that solving took
    share: float = 0.0  # of what is hidden that was paid for where this plan was found

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
    start = perf_counter()
    none = problem.priced(0.0)
    folded = fold(none)
    free = best(folded.costs, folded.tables, table=table, wide=wide)
    known = greedy(problem.priced(1.0))
    bound, share = free.bound, 0.0
    plans: list[tuple[int, ...]] = []
    least = 0.0
    if free.choice or not folded.costs:
        plan = folded.expand(free.choice)
        least = problem.bytes(plan)
        if (limit is None or least <= limit) and problem.beside(plan) <= 0:
            plans = [plan, *([folded.expand(free.second)] if free.second else [])]
            if free.bound >= free.value:
                bound = problem.cost(plan)  # the same but for rounding
        else:
            whole = measured(problem, folded)
            solver = lambda model: best_of(model, table=table, wide=wide)  # noqa: E731
            search = Search(problem, whole, limit, folded.expand, solver, branches)
            found = search.run(free)
            plans, bound, least, share = list(found.plans), found.bound, found.least, found.share
    plans.append(known)  # breaking a tie may pay; else it is no better, as far as rounding lets it be
    costs = {each: problem.cost(each) for each in plans if limit is None or problem.bytes(each) <= limit}
    ranked = sorted((each for each in costs if costs[each] < np.inf), key=lambda each: (costs[each], plans.index(each)))
    first = problem.cost(known)
    if not ranked:
        return Solution((), np.inf, bound, first, free.method, 0.0, False, least, None, perf_counter() - start)
    chosen = ranked[0]
    return Solution(
        choice=chosen,
        cost=costs[chosen],
        bound=min(bound, costs[chosen]),
        greedy=first,
        method="greedy" if chosen == known and known not in plans[:-1] else free.method,
        memory=problem.bytes(chosen),
        fits=True,
        least=least,
        runner_up=Plan(ranked[1], costs[ranked[1]]) if len(ranked) > 1 else None,
        seconds=perf_counter() - start,
        share=share,
    )
