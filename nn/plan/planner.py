"""The planner: the cheapest plan of a model on a cluster, as a plan, with what comes next and why it costs more.

Signatures are chosen all together by the graph's own chooser. Beside that the plans that people write by hand are tried
(data parallel, ZeRO-1, 2 and 3, the config's tensor parallel plan, blocks run again), so that the answer never costs
more than one of them that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...boxing.picture.palette import duration, volume
from ...placement import Cluster, cluster, default_cluster
from ...placement.errors import SbpError, SbpflowError
from ..graph.captures import Captures
from ..graph.explain import parts_of
from ..graph.step import Step
from .answer import answer
from .assignment import Assignment, assignment
from .away import last_ways, offloading
from .candidates import Candidate, candidates, resting
from .cases import Cases
from .check import Checked, Loss, checked_step, planned_step, priced_by
from .grids import grids_of
from .language.statements import ExpectAtMost, Limit, Seek
from .plan import Plan

__all__ = ["FoundPlan", "OtherPlan", "plan"]


NEARLY = 0.85  # of the bytes that the chooser counts, which the account may say that there are at least
CLOSE = 1e-3  # of seconds, between which and its bound a plan was looked for to the end
SURE = 1e-9  # of seconds, by which sums in another order may differ


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


class FoundPlan(Plan):
    """The plan that the planner found; `checked` is what it costs, `runners_up` what else was tried or ruled out.

    No plan that has equal layers alike takes less than `floor` seconds, with however much memory; 0: not known.
    """

    checked: Checked
    found: str  # what it is called among those that were tried
    runners_up: tuple[OtherPlan, ...] = ()
    floor: float = 0.0

    @property
    def gap(self) -> float:
        """The share of its seconds that a better plan could save at most."""
        return max(0.0, 1 - self.floor / self.checked.seconds) if self.checked.seconds else 0.0

    def table(self) -> str:
        """All that was tried, the best first."""
        best = f"{duration(self.checked.seconds)} a step, {volume(self.checked.memory)} on the fullest rank"
        less = f"however much memory there is, none is below {duration(self.floor)}, {self.gap:.1%} less"
        proved = "" if not self.floor else f"; {less}" if self.gap > SURE else "; no plan takes less"
        return "\n".join([f"found: {best}{proved}", *(f"  {one}" for one in self.runners_up)])


@dataclass(frozen=True, eq=False)
class _Tried:
    """A candidate as far as it was looked at: not at all (`why`, and `least` seconds), planned, or checked in full."""

    of: Candidate
    step: Step | None = None
    checked: Checked | None = None
    why: str = ""
    least: float = inf  # seconds below which it cannot be

    @property
    def seconds(self) -> float:
        if self.checked is not None:
            return self.checked.seconds
        return self.least if self.step is None else self.step.plan.decided.solution.cost

    @property
    def bound(self) -> float:
        """Seconds below which no plan is that says more than this one, and is a case of it, whatever memory it has."""
        if self.step is None or self.step.plan.pieces is not None:  # what is known there is of one micro-batch
            return -inf
        return self.step.plan.decided.floor

    def fits(self, limit: float | None) -> bool:
        return self.checked is not None and (limit is None or self.checked.memory <= limit)


def plan(
    model: nn.Module,
    batch: Any,
    *,
    plan: Plan | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    memory: float | None = None,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ranks: int | None = None,
    told: Callable[[str], object] = lambda line: None,
) -> FoundPlan:
    """The plan that takes least, within so many bytes a rank; nothing is run, and all may be on meta.

    `plan` may say a part: its grid, and what is not to be chosen. Without one the grid has an axis for each level of
    the cluster. `told` is called with a line for each plan that is tried.
    """
    with priced_by(cluster):
        given = _given(plan, cluster, ranks)
        seek = next((s for s in given.statements if isinstance(s, Seek)), None)
        if seek is not None:
            raise given.wrong(seek, "what", "seek is not built yet")
        limits = [memory, *(s.memory for s in given.statements if isinstance(s, Limit))]
        limit = next((each for each in limits if each is not None), None)
        trying = _Trying(model, batch, loss_fn, optimizer, ranks, limit)

        def attempt(one: Candidate) -> Checked | None:
            tried = trying.add(one)
            told(f"{one.name}: {_said(tried)}")
            return tried.checked

        for one in candidates(given, model, limit):
            found = attempt(one)
            if one.opened and limit is not None and found is not None and found.memory > limit:
                offloading(given, model, limit, found, attempt)
        if trying.best is None and limit is not None and trying.opened:
            for name, text in last_ways(given, model, limit).items():
                if trying.best is None:
                    attempt(Candidate(name, Plan.read(text)))
        best, tried = trying.best, trying.tried
        if best is None or best.step is None or best.checked is None:
            raise SbpError(tried[0].why or f"no plan that was tried fits into {volume(limit or 0)} a rank")
        said = answer(best.step, trying.meaning(best.of.plan), best.checked.report)
    within = "" if limit is None else f"{ExpectAtMost('memory', int(limit))}\n"
    made = FoundPlan.read(said if within in said else said + within)
    object.__setattr__(made, "checked", best.checked)
    object.__setattr__(made, "found", best.of.name)
    object.__setattr__(made, "floor", max(0.0, tried[0].bound))
    others = sorted((one for one in tried if one is not best), key=lambda one: _rank(one, limit))
    listed = tuple(
        OtherPlan(one.of.name, one.of.plan, one.checked, _why(one, best, limit), _at_least(one, best)[0])
        for one in others
    )
    object.__setattr__(made, "runners_up", listed)
    return made


class _Trying:
    """The candidates that were tried, for one model and batch; what all of them need is captured once.

    Checked in full are those that may be the answer. A plan that says more than the open one costs no less than the
    bound of what is possible there with parameters as it has them: where that is not below the best, it is not planned.
    Of one that was planned, and costs no less than the best, nobody asks for its memory. One whose weights, gradients
    and states alone take too much does not fit.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss | None,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        ranks: int | None,
        limit: float | None,
    ) -> None:
        self.model, self.batch, self.ranks, self.limit = model, batch, ranks, limit
        self.how: Any = {"loss_fn": loss_fn, "optimizer": optimizer, "ranks": ranks}
        self.captures = Captures()
        self.tried: list[_Tried] = []
        self.best: _Tried | None = None
        self.cases: Cases | None = None

    def add(self, one: Candidate) -> _Tried:
        """Try one more."""
        try:
            made = self.ruled_out(one) or self.planned(one)
        except SbpflowError as error:
            made = _Tried(one, why=str(error))
        if made.fits(self.limit) and (self.best is None or made.seconds < self.best.seconds):
            self.best = made
        self.tried.append(made)
        return made

    def planned(self, one: Candidate) -> _Tried:
        """A candidate with its step, checked if it may be the answer."""
        self.captures.enough = inf if self.best is None else self.best.seconds * (1 - SURE)
        step = planned_step(one.plan, self.model, self.batch, captures=self.captures, **self.how)
        if one.opened and step.plan.pieces is None:  # what is known of these is of one micro-batch
            self.cases = Cases(step.plan.decided)
        made = _Tried(one, step)
        if step.plan.pieces is None and self.best is not None and made.seconds >= self.best.seconds * (1 - SURE):
            return made
        return _Tried(one, step, checked_step(one.plan, step, self.model, self.batch, **self.how))

    @property
    def opened(self) -> _Tried | None:
        """The plan that has the others as cases."""
        return next((each for each in self.tried if each.of.opened), None)

    def ruled_out(self, one: Candidate) -> _Tried | None:
        """A candidate that cannot be the answer, as far as that is known before it is planned."""
        opened = self.opened
        if opened is None or opened.step is None:
            return None
        meaning = self.meaning(one.plan)
        least = resting(meaning, self.model, opened.step.plan.passes.states)
        if self.limit is not None and least > self.limit:
            why = f"weights, gradients and states alone take {volume(least)} of {volume(self.limit)}"
            return _Tried(one, why=why)
        if self.cases is None:
            return None
        if self.limit is not None and opened.checked is not None and meaning.memory is None:
            about = self.cases.holds(meaning) * opened.checked.memory
            if about * NEARLY > self.limit:
                return _Tried(one, why=f"about {volume(about)} at least of {volume(self.limit)}")
        if self.best is None:
            return None
        enough = self.best.seconds * (1 - SURE)
        bound = self.cases.least(meaning, enough)
        if not enough <= bound < inf:
            return None
        return _Tried(one, why=_no_less(bound, self.best), least=bound)

    def meaning(self, one: Plan) -> Assignment:
        return assignment(one, self.model, grids_of(one, self.ranks))


def _given(plan: Plan | str | Path | None, which: Cluster | str | Path | None, ranks: int | None) -> Plan:
    """The plan that is to be filled in, or a grid of the cluster's levels."""
    if isinstance(plan, Plan):
        return plan
    if plan is not None:
        return Plan.load(plan) if isinstance(plan, Path) or str(plan).endswith(".plan") else Plan.read(plan)
    there = default_cluster("cuda") if which is None else which if isinstance(which, Cluster) else cluster(which)
    node = there.levels[0].size if len(there.levels) > 1 else ranks or 1
    known = which is not None and "*" in str(which)
    size = ranks or (there.capacity[-1] if known else node)
    if size <= node or size % node:
        return Plan.read(f"grid cuda (device={size})")
    return Plan.read(f"grid cuda (node={size // node}, device={node})")


def _said(one: _Tried) -> str:
    if one.checked is not None:
        return f"{duration(one.seconds)}, {volume(one.checked.memory)}"
    if one.step is None:
        return one.why.partition("\n")[0]
    bound = one.step.plan.decided.solution.bound
    found = duration(one.seconds)
    return f"between {duration(bound)} and {found}" if bound < one.seconds * (1 - CLOSE) else found


def _rank(one: _Tried, limit: float | None) -> tuple[bool, float]:
    """Plans that may fit come first, and of these the cheapest."""
    return one.checked is not None and not one.fits(limit), one.seconds


def _why(one: _Tried, best: _Tried, limit: float | None) -> str:
    """The cost of another plan beyond the best, and in which part of the step."""
    if one.step is None and one.least < inf:  # what was the best when it was ruled out may not be the answer
        return _no_less(one.least, best)
    if one.step is None or best.step is None:
        return one.why.partition("\n")[0]
    if one.checked is not None and not one.fits(limit):
        return f"{duration(one.seconds)}, but takes {volume(one.checked.memory)} of {volume(limit or 0)}"
    seconds, stopped = _at_least(one, best)
    share = (seconds - best.seconds) / best.seconds if best.seconds else 0.0
    said = f"{'no less than ' * stopped}{duration(seconds)}, {share:+.1%}"
    if stopped:
        return said
    mine, other = parts_of(one.step.plan.decided), parts_of(best.step.plan.decided)
    parts = {part: spent - other[part] for part, spent in mine.items()}
    most = max(parts, key=lambda part: parts[part])
    return f"{said}, {duration(parts[most])} more for {most}" if parts[most] > 0 else said


def _no_less(bound: float, best: _Tried) -> str:
    share = max(0.0, bound / best.seconds - 1) if best.seconds else 0.0
    return f"no less than {duration(bound)}, {share:+.1%}"


def _at_least(one: _Tried, best: _Tried) -> tuple[float, bool]:
    """The seconds of a plan, or those that it takes at least: then it was not looked for to its end."""
    if one.step is None or one.checked is not None:
        return one.seconds, one.checked is None
    bound = one.step.plan.decided.solution.bound
    stopped = best.seconds <= bound < one.seconds * (1 - CLOSE)
    return (bound if stopped else one.seconds), stopped
