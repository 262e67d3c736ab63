"""The planner: the cheapest plan of a model on a cluster, what comes next, and why that costs more.

Signatures are chosen all together by the graph's own chooser. Beside that the plans that people write by hand are tried
(data parallel, ZeRO-1, 2 and 3, the config's tensor parallel plan, blocks run again), so that the answer never costs
more than one of them that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ....boxing.figures import duration, volume
from ....placement import Cluster, cluster, default_cluster
from ....placement.device import card_here
from ....placement.errors import SbpError, SbpflowError
from ....placement.world import world
from ....sbp import Layout
from ...explanations.step_report import explained
from ...graph.capture.surroundings.garbage import uncollected
from ...graph.captures import Captures
from ..answer import answer
from ..assignment import Assignment, assignment
from ..check import Checked, Loss, checked_step, device_of, planned_step, priced_by, room, samples_of
from ..grids import grids_of
from ..language.statements import Accumulate, ExpectAtMost, Grid, Limit, Seek
from ..plan import Plan, as_plan
from ..prediction import Prediction, predicted
from ..resting import RestingBytes
from .candidates import Candidate, candidates, leaves_all, resting, within_limit
from .cases import Cases
from .fewest import NothingFits
from .lighter import in_parts, last_ways, offloading
from .runners_up import OtherPlan, TriedPlan, no_less, runners_up, said_of

__all__ = ["FoundPlan", "OtherPlan", "plan"]


NEARLY = 0.85  # share of the bytes that the chooser counts; the account says at least so much
SURE = 1e-9  # share of seconds by which sums in another order may differ


class FoundPlan(Plan):
    """The plan that the planner found; `checked` is what it costs, `runners_up` what else was tried or ruled out.

    No plan that has equal layers alike takes less than `floor` seconds, with however much memory; 0: not known.
    """

    checked: Checked
    prediction: Prediction
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
        by = self.checked.report.devices
        head = [f"found: {best}{proved}", *([f"  priced by {by}"] if by else ())]
        return "\n".join([*head, *(f"  {one}" for one in self.runners_up)])


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
    if isinstance(model, Layout):
        raise SbpError(
            "flow.plan is the planner of a model, and was given a layout\n"
            "  how a tensor gets from one layout to another: flow.boxing.plan(src, dst)"
        )
    with priced_by(cluster), uncollected():
        given = _given(plan, cluster, ranks)
        seek = next((s for s in given.statements if isinstance(s, Seek)), None)
        if seek is not None:
            raise given.wrong(seek, "what", "seek is not built yet")
        limit, source = _limit(given, memory, ranks, model)
        trying = _Trying(model, batch, loss_fn, optimizer, ranks, limit)

        def attempt(one: Candidate) -> Checked | None:
            tried = trying.add(one)
            told(f"{one.name}: {said_of(tried)}")
            return tried.checked

        for number, one in enumerate(candidates(given, model)):
            found = attempt(one)
            if number == 0 and limit is not None and found is not None and found.memory > limit:
                in_parts(given, model, limit, found, samples_of(batch), attempt)
                for other in within_limit(given, model, limit):
                    attempt(other)
                if leaves_all(given):
                    offloading(given, model, limit, found, attempt)
        if trying.best is None and limit is not None and trying.opened:
            for name, text in last_ways(given, model, limit).items():
                if trying.best is None:
                    attempt(Candidate(name, Plan.read(text)))
        best, tried = trying.best, trying.tried
        if best is None or best.step is None or best.checked is None:
            raise nothing_fits(tried, limit)
        checked = replace(best.checked, report=explained(best.step))
        prediction = predicted(best.step, checked, batch, grids_of(given, ranks, model).whole.size)
        said = answer(best.step, trying.meaning(best.of.plan), checked.report)
    within = "" if limit is None else f"{ExpectAtMost('memory', int(limit))}"
    made = FoundPlan.read(said if not within or f"{within}\n" in said else f"{said}{within}{source}\n")
    object.__setattr__(made, "checked", checked)
    object.__setattr__(made, "prediction", prediction)
    object.__setattr__(made, "found", best.of.name)
    object.__setattr__(made, "floor", max(0.0, tried[0].bound))
    object.__setattr__(made, "runners_up", runners_up(tried, best, limit))
    return made


def nothing_fits(tried: Sequence[TriedPlan], limit: float | None) -> SbpError:
    """The error where no plan that was tried is an answer."""
    known = [(one.checked.memory, one.of.name) for one in tried if one.checked is not None]
    step = tried[0].step
    if step is None or limit is None or not known:
        return SbpError(tried[0].why or f"no plan that was tried fits into {volume(limit or 0)} a rank")
    memory, name = min(known)
    return NothingFits(limit, f"{volume(memory)}: {name}", RestingBytes.of(step))


class _Trying:
    """The candidates that were tried, for one model and batch, which share what can be captured once.

    Those that may be the answer are checked in full. A plan that says more than the open one costs no less than a
    bound, that of the open problem with parameters as this plan has them: where the bound is not below the best, the
    plan is not planned. The memory of a planned one that costs no less than the best is not asked for. One whose
    weights, gradients and states alone take too much does not fit.
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
        parts = any(isinstance(line, Accumulate) for line in one.plan.statements)
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
        return TriedPlan(one, step, checked)

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


def _limit(given: Plan, memory: float | None, ranks: int | None, model: nn.Module) -> tuple[float | None, str]:
    """Bytes of a rank within which to stay, and a remark where nobody gave them: those of the cluster's device."""
    said = [memory, *(s.memory for s in given.statements if isinstance(s, Limit))]
    for limit in said:
        if limit is not None:
            return limit, ""
    device = device_of(given, ranks, model)
    if device.room == inf:
        return None, ""
    return device.room, f"  # {room(device)}"


def _given(plan: Plan | str | Path | None, which: Cluster | str | Path | None, ranks: int | None) -> Plan:
    """The plan that is to be filled in; one without a grid, or none, gets that of the cluster's levels."""
    said = as_plan(plan)
    if said is None:
        return Plan.read(_grid(which, ranks))
    if any(isinstance(line, Grid) for line in said.statements):
        return Plan.read(said.text, said.name)
    return Plan.read(f"{_grid(which, ranks)}\n{said.text}", said.name)


def _grid(which: Cluster | str | Path | None, ranks: int | None) -> str:
    """A grid with an axis `data`, along which batches are cut, and inside of hosts `tensor` where there are several."""
    card = card_here()
    cards = card.count if card else 0
    here = default_cluster(card.name if card else "cpu")
    there = here if which is None else which if isinstance(which, Cluster) else cluster(which)
    kind = there.device.type
    if which is None:
        ranks = ranks or world().size
    if ranks is None and kind == "cpu":
        raise SbpError(
            "flow.plan: nothing says on how many ranks the model is to run, and there is no card here\n"
            '  give it ranks=4, a grid, as in plan="grid (data=4)", or what to plan for, as in cluster="h100x8"'
        )
    several = len(there.levels) > 1
    # Hosts of unequal numbers of ranks have no axis of their own.
    node = ranks or 1 if not several else 1 if there.levels[0].groups else there.levels[0].size
    known = which is not None and "*" in str(which)
    size = ranks or (there.capacity[-1] if known else min(node, cards) if which is None and cards else node)
    if node == 1 or size <= node or size % node:
        return f"grid {kind} (data={size})"
    return f"grid {kind} (data={size // node}, tensor={node})"
