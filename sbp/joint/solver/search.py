"""Search: the cheapest plan that fits, and a bound of all plans.

Hidden seconds cost as much as there is no room for. First the multipliers whose bound is highest. There each candidate
that is in no plan as good as one that is known goes for good, so that further looks are at little. Plans between the
bound and the best plan are then looked for branch by branch: a variable for which two plans take different candidates
takes these, or those.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..problem import Problem
from .best import Best
from .eliminate import components
from .local_search import Nearby
from .measured import Drawn, Measured, drawn
from .messages import above
from .mixtures import mixture
from .multipliers import At, Climb, climbed, higher
from .polish import polished
from .presolve import Model

__all__ = ["BRANCHES", "CLOSE", "Found", "Near", "Search"]

CLOSE = 1e-3  # share of the cost that a better plan may save unseen, where it takes another look to see it
ENOUGH = 1e-2  # where it takes branches
TIGHT = 0.05  # share of the cost between bound and plan at which candidates are worth dropping
LESS = 0.5  # share of that distance that is to go before it is worth dropping more
TURNS = 24  # looks from all multipliers there are; hulls have a few corners
STEPS = 2  # looks around a branch
BRANCHES = 16
MIXED = 3  # plans of which each two are mixed by blocks
PLANS = 4  # cheapest ones, to be improved and offered to another search


class Found(NamedTuple):
    """Choices for all nodes, the cheapest first; none if nothing fits."""

    plans: tuple[tuple[int, ...], ...]
    bound: float  # no plan that keeps the ties and fits has less
    least: float  # bytes of the plan that needs least, where a limit made it worth asking
    near: "Near | None"


class Near(NamedTuple):
    """The end of a search, from which one with much the same bytes starts. `plans` are choices for all nodes that
    fitted, `planes` choices for all variables whose planes are low at these multipliers."""

    at: At
    plans: tuple[tuple[int, ...], ...]
    planes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class _Branch:
    left: Measured
    climb: Climb


class Search:
    """The search of a problem, of which `expand` tells the choice of every node from that of every variable. It ends
    where nothing is below a `level`."""

    def __init__(
        self,
        problem: Problem,
        whole: Measured,
        limit: float | None,
        expand: Callable[[tuple[int, ...]], tuple[int, ...]],
        solver: Callable[[Model], Best],
        branches: int = BRANCHES,
        level: float = np.inf,
    ) -> None:
        self.branches, self.level = branches, level
        self.problem, self.whole, self.limit, self.expand, self.solver = problem, whole, limit, expand, solver
        self.most = np.inf if limit is None else limit
        self.met: dict[tuple[int, ...], float] = {}  # what fits, for all nodes, and its cost
        self.best = np.inf

    def offer(self, choice: tuple[int, ...]) -> None:
        """Take note of a plan for all nodes, if it fits."""
        plan = drawn(self.problem, choice)
        if plan.bytes <= self.most and plan.cost < np.inf:
            self.met.setdefault(choice, plan.cost)
            self.best = min(self.best, plan.cost)

    def look(self, left: Measured, at: At) -> tuple[Best, Drawn | None]:
        """The cheapest plan at these multipliers; it, or a plan near it, may be the best of all."""
        found = self.solver(left.problem(*at))
        if not found.choice:
            return found, None
        plan = left.drawn(found.choice)
        near = polished(left, plan, self.most)
        for each in (plan, near):
            if each is not None and each.bytes <= self.most and each.cost < self.best * (1 - 1e-12):
                self.offer(self.expand(each.choice))
        return found, plan

    def offer_near(self, plan: Drawn) -> None:
        """Take note of what a plan becomes, one variable at a time."""
        near = polished(self.whole, plan, self.most)
        if near is not None:
            self.offer(self.expand(near.choice))

    def enough(self, bound: float, share: float = CLOSE) -> bool:
        return bound >= min(self.best * (1 - share), self.level)

    def climbed(self, branch: _Branch, turns: int, share: float, near: bool = False) -> _Branch:
        climb = climbed(
            lambda at: self.look(branch.left, at),
            branch.climb,
            self.limit,
            turns,
            known=lambda: self.best,
            enough=lambda bound: self.enough(bound, share),
            near=near,
        )
        return _Branch(branch.left, climb)

    def run(self, free: Best, near: Near | None = None) -> Found:
        """All of it, from the plan that is best where nothing is paid for, or from where another search ended."""
        root = self.warm(free, near) if near is not None else None
        least = min(map(self.problem.bytes, self.met), default=np.inf)
        if root is None:
            planes, least = self.cold(free)
            if least > self.most:
                return Found((), np.inf, least, None)
            root = _Branch(self.whole, Climb(free.bound, At(0.0, 0.0), planes))
        branch = self.settled(root)
        if branch.climb.bound < self.level:
            self.mix(branch.climb)
        bound, climb = branch.climb.bound, branch.climb
        if self.branches and not self.enough(bound, ENOUGH):
            level = self.best * (1 - ENOUGH)
            bound = max(bound, min(level, self.branched(self.dropped(branch, level))))
        ranked = tuple(sorted(self.met, key=lambda choice: (self.met[choice], choice)))
        ended = Near(climb.at, ranked[:PLANS], tuple(plan.choice for plan in climb.planes))
        return Found(ranked, min(bound, self.best), least, ended)

    def cold(self, free: Best) -> tuple[tuple[Drawn, ...], float]:
        """Plans far apart, from which all multipliers are between; and the bytes of the one that needs least."""
        start = self.whole.drawn(free.choice)
        planes, least = [start], start.bytes
        if start.bytes > self.most:
            dear = At(0.0, 2 * max(1.0, _all(self.whole)))  # a byte is dearer than all else
            lean = self.solver(self.whole.problem(*dear))
            plan = self.whole.drawn(lean.choice) if lean.choice else None
            least = np.inf if plan is None else plan.bytes
            if plan is None or least > self.most:
                return (), least
            self.offer(self.expand(plan.choice))
            self.offer_near(plan)
            planes.append(plan)
        if start.beside > 0:
            _, paid = self.look(self.whole, At(1.0, 0.0))
            planes += [paid] if paid is not None else []
        self.offer_near(start)
        return tuple(planes), least

    def warm(self, free: Best, near: Near) -> _Branch | None:
        """A first look where the bound of another problem was highest; none if nothing fits there."""
        for choice in near.plans:
            self.offer(choice)
        found, plan = self.look(self.whole, near.at)
        if plan is None or self.best == np.inf:
            return None
        planes = (*map(self.whole.drawn, near.planes), plan)
        low = found.bound - near.at.price * (self.limit or 0.0)
        climb = Climb(max(low, free.bound), near.at, planes)
        self.mix(climb)
        return _Branch(self.whole, climb)

    def settled(self, branch: _Branch) -> _Branch:
        """Look from all multipliers there are, at what is left after each look."""
        apart = TIGHT * self.best
        for _ in range(TURNS):
            if self.whole.reduced is None and self.best - branch.climb.bound <= min(apart, TIGHT * self.best):
                if self.enough(branch.climb.bound) or not higher(branch.climb, self.limit, self.best):
                    break
                branch, apart = self.dropped(branch, self.best), LESS * (self.best - branch.climb.bound)
            before = len(branch.climb.planes)
            branch = self.climbed(branch, 1, CLOSE)
            if len(branch.climb.planes) == before:
                break
        return branch

    def mix(self, climb: Climb) -> None:
        """Offer mixtures of plans by blocks, and what is near them."""
        share, price = climb.at
        order = sorted(climb.planes, key=lambda plan: plan.at(share, price))[:MIXED]
        choices = [self.expand(plan.choice) for plan in order]
        nearby = Nearby(self.problem)
        for early in choices:
            for late in choices:
                mixed = mixture(self.problem, early, late, self.most) if early != late else None
                if mixed is not None:
                    self.offer(mixed)
        for choice in sorted(self.met, key=lambda choice: (self.met[choice], choice))[:PLANS]:
            self.offer(nearby.improved(self.problem, choice, self.most))

    def dropped(self, branch: _Branch, level: float) -> _Branch:
        """Without candidates that are in no plan of less than this, or in none better than with another."""
        left, at = branch.left, branch.climb.at
        model = left.model(*at)
        parts = [above(model, part) for part in components(model)]
        slack = (level + at.price * (self.limit or 0.0)) * (1 + 1e-9) - sum(low for low, _ in parts)
        keeps = {n: model.lives[n][more <= slack] for _, of in parts for n, more in of.items()}
        if not all(len(keep) for keep in keeps.values()):
            return branch
        return _Branch(left.kept(keeps), branch.climb)

    def branched(self, root: _Branch) -> float:
        """The bound when the branches with the lowest bounds have been looked at."""
        open_, number, floor = [(root.climb.bound, 0, root)], 1, np.inf
        for _ in range(self.branches):
            if not open_ or self.enough(open_[0][0], ENOUGH):
                break
            bound, _, branch = heapq.heappop(open_)
            halves = _halves(branch)
            if not halves:  # its one plan was looked at
                continue
            at, planes = branch.climb.at, branch.climb.planes
            for left in halves:
                found, plan = self.look(left, at)
                low = max(bound, found.bound - at.price * (self.limit or 0.0))
                known = tuple(p for p in planes if left.places(p.choice) is not None)
                if plan is not None and plan not in known:
                    known = (*known, plan)
                child = self.climbed(_Branch(left, Climb(low, at, known)), STEPS, ENOUGH, near=True)
                if not self.enough(child.climb.bound, ENOUGH):
                    heapq.heappush(open_, (child.climb.bound, number, child))
                    number += 1
                else:
                    floor = min(floor, child.climb.bound)
        return min(floor, open_[0][0] if open_ else np.inf)


def _halves(branch: _Branch) -> list[Measured]:
    """The candidates of a variable, parted where plans differ most in what the multipliers pay for."""
    left, (share, price) = branch.left, branch.climb.at
    order = sorted(branch.climb.planes, key=lambda plan: plan.at(share, price))
    places = [where for plan in order if (where := left.places(plan.choice)) is not None]
    weight = [share * b + price * m for b, m in zip(left.beside, left.memory, strict=True)]
    for other in places[1:]:
        one = places[0]
        apart = {
            n: abs(float(weight[n][k] - weight[n][m]))
            for n, (k, m) in enumerate(zip(one, other, strict=True))
            if k != m
        }
        for table in left.hidden:
            change = share * abs(table.value(one) - table.value(other))
            apart.update({n: apart[n] + change for n in table.nodes if n in apart})
        if apart:
            at = max(apart, key=lambda n: (apart[n], -n))
            low, middle = weight[at], (weight[at][one[at]] + weight[at][other[at]]) / 2
            part = low <= middle if low[one[at]] != low[other[at]] else np.arange(len(low)) == one[at]
            break
    else:
        at = max(range(len(weight)), key=lambda n: (float(np.ptp(weight[n])), len(weight[n]), -n))
        if len(weight[at]) < 2:
            return []
        part = weight[at] <= weight[at].mean()
        if part.all():
            part = np.arange(len(part)) == 0
    return [left.kept({at: np.flatnonzero(side)}) for side in (part, ~part)]


def _all(left: Measured) -> float:
    """More seconds than any two plans differ by."""
    every = [*left.costs, *(table.values for table in left.tables)]
    return 2 * sum(float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in every)
