"""A limit of memory: the cheapest plans at a price for each byte, and of two such plans the best mixture by blocks.

Every price gives a plan and a lower bound: what it costs with its bytes paid for, less the price of the limit. The
price moves to where the plan that fits and the one that does not cost the same, until no plan lies below both: that is
the lower convex hull of what is possible. Between the two, equal blocks are the change: early blocks take one plan and
late blocks the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .best import Best
from .fold import Folded
from .nearby import Nearby
from .problem import Ints, Problem

__all__ = ["Fitted", "fitted"]

Solver: TypeAlias = Callable[[float], Best]  # of the folded problem, with a byte at this price
PRICES = 40  # hulls have a few corners; this only ends a quarrel about rounding
NEAR = 1e-5  # share of the cost below which another price is not worth its time


@dataclass(frozen=True, slots=True)
class Fitted:
    """The cheapest plan found that fits, for each node; () if none does."""

    choice: tuple[int, ...]
    bound: float  # no plan that keeps the ties and fits has less
    least: float  # bytes of the plan that needs least
    other: tuple[int, ...]  # the next best that was met on the way, or ()


def fitted(problem: Problem, folded: Folded, free: Best, limit: float, solver: Solver) -> Fitted:
    """What fits into `limit` bytes, where `free`, the best plan without a limit, does not."""
    lean = solver(2 * max(1.0, _all(folded)))  # a byte is dearer than all seconds together
    least = folded.bytes(lean.choice) if lean.choice else np.inf
    if least > limit:
        return Fitted((), np.inf, least, ())
    over, under, bound = free.choice, lean.choice, free.bound
    met = [under]
    for _ in range(PRICES):
        more, less = folded.cost(over), folded.cost(under)
        price = (less - more) / (folded.bytes(over) - folded.bytes(under))
        if price <= 0:
            break
        found = solver(price)
        bound = max(bound, found.bound - price * limit)
        line = more + price * folded.bytes(over)
        if not found.choice or found.value >= line - NEAR * abs(line):
            break
        if folded.bytes(found.choice) <= limit:
            under = found.choice
            met.append(under)
        else:
            over = found.choice
    plans = [folded.expand(plan) for plan in met]
    early, late = folded.expand(over), folded.expand(under)
    plans += [*_mixtures(problem, early, late, limit), *_mixtures(problem, late, early, limit)]
    nearby = Nearby(problem)
    plans += [nearby.improved(problem, plan, limit) for plan in plans]
    ranked = sorted((problem.cost(plan), at) for at, plan in enumerate(plans) if problem.bytes(plan) <= limit)
    chosen = plans[ranked[0][1]]
    other = next((plans[at] for _, at in ranked if plans[at] != chosen), ())
    return Fitted(chosen, bound, least, other)


def _all(folded: Folded) -> float:
    """More seconds than any two plans differ by."""
    every = [*folded.costs, *(table.values for table in folded.tables)]
    return 2 * sum(float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in every)


def _mixtures(problem: Problem, early: Sequence[int], late: Sequence[int], limit: float) -> list[tuple[int, ...]]:
    """The cheapest plan that fits where the first few blocks choose as `early` does and all others as `late`, if any.

    All numbers of blocks are priced at once: each node and edge adds its change where its blocks turn.
    """
    place = _places(problem)
    count = int(place.max(initial=-1)) + 2  # how many blocks take `early`: none, one, ... all
    where: list[int] = []  # from this many blocks on ...
    change: list[float] = []  # ... so many seconds more, perhaps inf
    held = np.zeros(count)
    for n, (a, b) in enumerate(zip(early, late, strict=True)):
        where += [0, place[n] + 1, place[n] + 1]
        change += [problem.costs[n][b], problem.costs[n][a], -problem.costs[n][b]]
        held[0] += problem.memory[n][b]
        held[place[n] + 1] += problem.memory[n][a] - problem.memory[n][b]
    for edge in problem.edges:
        m, (i, j) = edge.matrix, (edge.i, edge.j)
        one, both = sorted((place[i] + 1, place[j] + 1))
        half = m[early[i], late[j]] if place[i] < place[j] else m[late[i], early[j]]
        where += [0, one, one, both, both]
        change += [m[late[i], late[j]], half, -m[late[i], late[j]], m[early[i], early[j]], -half]
    at, by = np.array(where), np.array(change)
    forbids = np.isinf(by)
    seconds = np.bincount(at, np.where(forbids, 0.0, by), count).cumsum()
    forbidden = np.bincount(at, np.where(forbids, np.sign(by), 0.0), count).cumsum()
    seconds[(forbidden > 0) | (held.cumsum() > limit)] = np.inf
    best = int(seconds.argmin())
    if np.isinf(seconds[best]):
        return []
    mixed = np.where(place < best, early, late)
    return [tuple(mixed.tolist())]


def _places(problem: Problem) -> Ints:
    """Of each node, the place of its block among all blocks; a node in no block is one of its own."""
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
