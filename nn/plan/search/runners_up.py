"""Runners-up: plans that were tried and are not the answer, the seconds that they take at least, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ....boxing.figures import duration, volume
from ...explanations.step_report import parts_of
from ...graph.step import Step
from ..check import Checked
from ..plan import Plan
from .candidates import Candidate

__all__ = ["OtherPlan", "TriedPlan", "no_less", "runners_up", "said_of"]

CLOSE = 1e-3  # share of seconds: a plan no farther above its bound was looked for to the end


@dataclass(frozen=True, eq=False)
class OtherPlan:
    """Another plan that was tried, and why it is not the answer. It takes `seconds` at least, infinitely many where
    nothing is known but that it cannot be; `checked` in full are those alone that might have been the answer."""

    name: str
    plan: Plan
    checked: Checked | None
    why: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, eq=False)
class TriedPlan:
    """A candidate as far as it was looked at: not at all (`why`, and `least` seconds), planned, or checked in full."""

    of: Candidate
    step: Step | None = None
    checked: Checked | None = None
    why: str = ""
    least: float = inf  # seconds below which it cannot be
    taken: float = 0.0  # bytes of the fullest rank, gaps and all

    @property
    def seconds(self) -> float:
        if self.checked is not None:
            return self.checked.seconds
        return self.least if self.step is None else self.step.plan.decided.solution.cost

    @property
    def bound(self) -> float:
        """Seconds below which no plan is that says more than this one, and is a case of it, whatever memory it has."""
        if self.step is None or self.step.plan.pieces is not None:  # whose bound is that of one micro-batch
            return -inf
        return self.step.plan.decided.floor

    def fits(self, limit: float | None) -> bool:
        return self.checked is not None and (limit is None or self.taken <= limit)


def runners_up(tried: Sequence[TriedPlan], best: TriedPlan, limit: float | None) -> tuple[OtherPlan, ...]:
    """All but the best, those that may fit first, and of these the cheapest."""
    others = sorted((one for one in tried if one is not best), key=lambda one: _rank(one, limit))
    return tuple(
        OtherPlan(one.of.name, one.of.plan, one.checked, _why(one, best, limit), _at_least(one, best)[0])
        for one in others
    )


def said_of(one: TriedPlan) -> str:
    """A line on a plan when it was tried."""
    if one.checked is not None:
        return f"{duration(one.seconds)}, {volume(one.checked.memory)}"
    if one.step is None:
        return one.why.partition("\n")[0]
    bound = one.step.plan.decided.solution.bound
    found = duration(one.seconds)
    return f"between {duration(bound)} and {found}" if bound < one.seconds * (1 - CLOSE) else found


def _rank(one: TriedPlan, limit: float | None) -> tuple[bool, float]:
    """Plans that may fit come first, and of these the cheapest."""
    return one.checked is not None and not one.fits(limit), one.seconds


def _why(one: TriedPlan, best: TriedPlan, limit: float | None) -> str:
    """The cost of another plan beyond the best, and in which part of the step."""
    if one.step is None and one.least < inf:  # the best plan when it was ruled out may not be the answer
        return no_less(one.least, best)
    if one.step is None or best.step is None:
        return one.why.partition("\n")[0]
    if one.checked is not None and not one.fits(limit):
        return f"{duration(one.seconds)}, but takes {volume(int(one.taken))} of {volume(limit or 0)}"
    seconds, stopped = _at_least(one, best)
    share = (seconds - best.seconds) / best.seconds if best.seconds else 0.0
    said = f"{'no less than ' * stopped}{duration(seconds)}, {share:+.1%}"
    if stopped:
        return said
    mine, other = parts_of(one.step.plan.decided), parts_of(best.step.plan.decided)
    parts = {part: spent - other[part] for part, spent in mine.items()}
    most = max(parts, key=lambda part: parts[part])
    return f"{said}, {duration(parts[most])} more for {most}" if parts[most] > 0 else said


def no_less(bound: float, best: TriedPlan) -> str:
    """Words for seconds below which a plan cannot be, beside the best."""
    share = max(0.0, bound / best.seconds - 1) if best.seconds else 0.0
    return f"no less than {duration(bound)}, {share:+.1%}"


def _at_least(one: TriedPlan, best: TriedPlan) -> tuple[float, bool]:
    """The seconds of a plan, or those that it takes at least: then it was not looked for to its end."""
    if one.step is None or one.checked is not None:
        return one.seconds, one.checked is None
    bound = one.step.plan.decided.solution.bound
    stopped = best.seconds <= bound < one.seconds * (1 - CLOSE)
    return (bound if stopped else one.seconds), stopped
