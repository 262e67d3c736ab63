"""Solving: all signatures of a graph at the least cost together, with a bound that proves it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal

import numpy as np

from .best import Method, best, best_of
from .fold import fold
from .limit import fitted
from .nearby import greedy
from .presolve import Model, presolve
from .problem import Problem

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


SHARES = 6  # of what is hidden, that are tried
CLOSE = 1e-3  # share of the cost that more shares may be left to save
NEAR = 1e-4  # share of the cost below which another one is not worth its time


def solve(
    problem: Problem, *, limit: float | None = None, table: int = 3 * 10**7, wide: Method | None = None
) -> Solution:
    """The best plan of at most `limit` bytes; exact while no table on the way passes `table` cells.

    What is hidden costs only where there is no room for it, max(0, hidden - room), which is the most that any share of
    it comes to: each share is a problem of its own, whose bound holds. If the plan at none has room for all it is the
    best, as is the plan at all of it if that has none left; else the share moves to where both cost the same.
    """
    if not any(edge.hidden is not None for edge in problem.edges):
        return _solved(problem, limit, table, wide)
    start = perf_counter()
    met: list[Solution] = []

    def look(share: float) -> tuple[Solution, float]:
        found = _solved(problem.priced(share), limit, table, wide)
        met.append(replace(found, share=share))
        return found, problem.beside(found.choice) if found.choice else 0.0

    low, over = look(0.0)
    if over > 0:
        high, under = look(1.0)
        for _ in range(SHARES if under < 0 else 0):
            none = problem.priced(0.0)
            share = (none.cost(high.choice) - none.cost(low.choice)) / (over - under)
            if not 0 < share < 1:
                break
            line = none.cost(low.choice) + share * over
            known = min(none.cost(low.choice) + over, none.cost(high.choice))
            if known - max(each.bound for each in met) <= CLOSE * known:
                break
            found, rest = look(share)
            if found.cost >= line - NEAR * abs(line):
                break
            if rest > 0:
                low, over = found, rest
            else:
                high, under = found, rest
    first = greedy(problem.priced(1.0))
    return _best_of(problem, met, first, limit, perf_counter() - start)


def _best_of(
    problem: Problem, met: Sequence[Solution], first: tuple[int, ...], limit: float | None, seconds: float
) -> Solution:
    """The cheapest of plans that were found at several shares of what is hidden, or one op after the other."""
    allowed = [found for found in met if found.choice]
    if not allowed:
        return replace(met[0], seconds=seconds)
    plans: dict[tuple[int, ...], float] = {}
    for found in allowed:
        plans.setdefault(found.choice, problem.cost(found.choice))
        if found.runner_up is not None:
            plans.setdefault(found.runner_up.choice, problem.cost(found.runner_up.choice))
    known = problem.cost(first)
    if limit is None or problem.bytes(first) <= limit:
        plans.setdefault(first, known)
    ranked = sorted(plans, key=lambda choice: (plans[choice], choice))
    best = ranked[0]
    of = next((found for found in allowed if found.choice == best), allowed[0])
    return replace(
        of,
        choice=best,
        cost=plans[best],
        bound=min(max(found.bound for found in allowed), plans[best]),
        greedy=known,
        memory=problem.bytes(best),
        runner_up=Plan(ranked[1], plans[ranked[1]]) if len(ranked) > 1 else None,
        seconds=seconds,
    )


def _solved(problem: Problem, limit: float | None, table: int, wide: Method | None) -> Solution:
    """The best plan where nothing is hidden.

    Wider graphs go to HiGHS where scipy is installed, else to bounds (`wide` says which; "elimination" is exact however
    long it takes). With a limit the plan is the best found at all prices of a byte, and `bound` says how far the best
    can be. The runner-up is the second-best of all plans that keep the ties where tables stayed
    small; else the next best that was met.
    """
    start = perf_counter()
    folded = fold(problem)

    free = best(folded.costs, folded.tables, table=table, wide=wide)
    bound, method = free.bound, free.method
    plans = [folded.expand(plan) for plan in (free.choice, free.second) if plan or not folded.costs]
    if plans and free.bound >= free.value:
        bound = problem.cost(plans[0])  # the same but for rounding
    least = problem.bytes(plans[0]) if plans else 0.0
    if plans and limit is not None and least > limit:
        reduced = Model(folded.costs, folded.tables, folded.memory)
        presolve(reduced)  # once for all prices
        found = fitted(
            problem, folded, free, limit, lambda price: best_of(reduced.priced(price), table=table, wide=wide)
        )
        bound, least = found.bound, found.least
        plans = [plan for plan in (found.choice, found.other) if plan]
    first = greedy(problem)
    plans.append(first)  # breaking a tie may pay; else it is no better, as far as rounding lets it be
    plans = [plan for plan in plans if limit is None or problem.bytes(plan) <= limit]
    costs = [problem.cost(plan) for plan in plans]
    ranked = sorted((k for k in range(len(plans)) if costs[k] < np.inf), key=lambda k: (costs[k], k))
    known = problem.cost(first)
    if not ranked:
        return Solution((), np.inf, bound, known, method, 0.0, False, least, None, perf_counter() - start)
    best_plan = plans[ranked[0]]
    others = [k for k in ranked if plans[k] != best_plan]
    return Solution(
        choice=best_plan,
        cost=costs[ranked[0]],
        bound=min(bound, costs[ranked[0]]),
        greedy=known,
        method="greedy" if plans[ranked[0]] is first else method,
        memory=problem.bytes(best_plan),
        fits=True,
        least=least,
        runner_up=Plan(plans[others[0]], costs[others[0]]) if others else None,
        seconds=perf_counter() - start,
    )
