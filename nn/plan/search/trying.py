"""Trying plans: candidates in turn, for one model and batch, and the best of them so far."""

from collections.abc import Sequence
from math import inf
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ....boxing.figures import volume
from ....placement.errors import SbpflowError
from ...graph.captures import Captures
from ..assignment import Assignment, assignment
from ..check import Loss, checked_step, planned_step
from ..grids import grids_of
from ..language.statements import Accumulate, Pipe
from ..plan import Plan
from .candidates import Candidate, resting
from .cases import Cases
from .runners_up import TriedPlan, no_less

__all__ = ["SURE", "Trying"]

NEARLY = 0.85  # share of the bytes that the chooser counts; the account says at least so much
SURE = 1e-9  # share of seconds by which sums in another order may differ


class Trying:
    """The candidates that were tried, for one model and batch, which share what can be captured once.

    Those that may be the answer are checked in full. A plan that says more than the open one costs no less than a
    bound, that of the open problem with parameters as this plan has them: where the bound is not below the best, the
    plan is not planned. The memory of a planned one that costs no less than the best is not asked for. One whose
    weights, gradients and states alone take too much does not fit. What comes and goes has `gaps` of such a share of
    its bytes, which count against the limit.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss | None,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        ranks: int | None,
        limit: float | None,
        gaps: float = 0.0,
    ) -> None:
        self.model, self.batch, self.ranks, self.limit, self.gaps = model, batch, ranks, limit, gaps
        self.loss_fn, self.optimizer = loss_fn, optimizer
        self.captures = Captures()
        self.tried: list[TriedPlan] = []
        self.best: TriedPlan | None = None
        self.cases: Cases | None = None

    def add(self, one: Candidate) -> TriedPlan:
        """Try one more."""
        try:
            made = self.ruled_out(one) or self.planned(one)
        except SbpflowError as error:
            made = TriedPlan(one, why=str(error))
        if made.fits(self.limit) and (self.best is None or made.seconds < self.best.seconds):
            self.best = made
        self.tried.append(made)
        return made

    def planned(self, one: Candidate) -> TriedPlan:
        """A candidate with its step, checked if it may be the answer."""
        parts = any(isinstance(line, Accumulate | Pipe) for line in one.plan.statements)
        self.captures.enough = inf if parts or self.best is None else self.best.seconds * (1 - SURE)
        model, batch, loss_fn, optimizer, ranks = self.model, self.batch, self.loss_fn, self.optimizer, self.ranks
        step = planned_step(
            one.plan, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, captures=self.captures
        )
        if one.opened and step.plan.pieces is None:  # else it is known of one micro-batch alone
            self.cases = Cases(step.plan.decided)
        made = TriedPlan(one, step)
        if step.plan.pieces is None and self.best is not None and made.seconds >= self.best.seconds * (1 - SURE):
            return made
        checked = checked_step(
            one.plan, step, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, idle=False
        )
        return TriedPlan(one, step, checked, taken=checked.taken(self.gaps))

    @property
    def opened(self) -> TriedPlan | None:
        """The plan that has the others as cases."""
        return next((each for each in self.tried if each.of.opened), None)

    def ruled_out(self, one: Candidate) -> TriedPlan | None:
        """A candidate that cannot be the answer, as far as that is known before it is planned."""
        opened = self.opened
        if opened is None or opened.step is None:
            return None
        meaning = self.meaning(one.plan)
        trained = {source.value.name for source in opened.step.graph.sources if source.value.grad}
        least = resting(meaning, self.model, opened.step.plan.passes.states, trained)
        if self.limit is not None and least > self.limit:
            why = f"weights, gradients and states alone take {volume(least)} of {volume(self.limit)}"
            return TriedPlan(one, why=why)
        if self.cases is None:
            return None
        alike = meaning.options.keys().isdisjoint({"memory", "micro_batches"})  # holds what the open one does
        if self.limit is not None and opened.checked is not None and alike:
            about = self.cases.holds(meaning) * opened.checked.memory
            if about * NEARLY > self.limit:
                return TriedPlan(one, why=f"about {volume(about)} at least of {volume(self.limit)}")
        if self.best is None:
            return None
        enough = self.best.seconds * (1 - SURE)
        bound = self.cases.least(meaning, enough)
        if not enough <= bound < inf:
            return None
        return TriedPlan(one, why=no_less(bound, self.best), least=bound)

    def meaning(self, one: Plan) -> Assignment:
        return assignment(one, self.model, grids_of(one, self.ranks, self.model))
