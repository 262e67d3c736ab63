"""The planner: the cheapest plan of a model on a cluster, what comes next, and why that costs more.

Signatures are chosen all together by the graph's own chooser. Beside that the plans that people write by hand are tried
(data parallel, ZeRO-1, 2 and 3, the config's tensor parallel plan, blocks run again), so that the answer never costs
more than one of them that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from ....boxing.figures import duration, volume
from ....boxing.html import paragraph, table
from ....placement import Cluster, cluster, default_cluster
from ....placement.device import card_here
from ....placement.errors import SbpError
from ....placement.hardware import GAPS, Device
from ....placement.world import world
from ....sbp import Layout
from ...explanations.step_report import with_idle
from ...graph.capture.surroundings.garbage import uncollected
from ..answer import answer
from ..check import Checked, Loss, device_of, priced_by, room, samples_of, words_a_sample
from ..grids import grids_of
from ..language.plan_text import PlanText
from ..language.statements import ExpectAtMost, Grid, Limit
from ..plan import Plan, as_plan
from ..prediction import Prediction, predicted
from ..resting import RestingBytes
from .candidates import Candidate, candidates, leaves_all, within_limit
from .estimates.ahead import CAN_FORK
from .fewest import NothingFits
from .lighter import in_parts, last_ways, offloading
from .open_degrees import leaves_degrees, space_of
from .runners_up import OtherPlan, TriedPlan, runners_up, said_of
from .seeking import Seeking
from .trying import SURE, Trying

__all__ = ["FoundPlan", "OtherPlan", "find_plan"]


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

    def _repr_html_(self) -> str:
        tried = [(one.name, duration(one.seconds) if isfinite(one.seconds) else "", one.why) for one in self.runners_up]
        said = paragraph(self.table().splitlines()[0], strong=True) + super()._repr_html_()
        return said + (table(("tried", "at least", "why not"), tried, (1,)) if tried else "")


def find_plan(
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
    processes: int = 1,
) -> FoundPlan:
    """The plan that takes least, within so many bytes a rank; nothing is run, and all may be on meta.

    `plan` may say a part: its grid, and what is not to be chosen. Without one the grid has an axis for each level of
    the cluster. `told` is called with a line for each plan that is tried. Where degrees are left open, two `processes`
    may look for them: a fork of this one works ahead, which takes less time and finds the same.
    """
    if isinstance(model, Layout):
        raise SbpError(
            "flow.find_plan is the planner of a model, and was given a layout\n"
            "  how a tensor gets from one layout to another: flow.boxing.between(src, dst)"
        )
    if not isinstance(model, nn.Module):
        raise SbpError(
            f"flow.find_plan of {type(model).__name__}\n"
            "  give it an nn.Module first, and a plan by its name: flow.find_plan(model, batch, plan=...)"
        )
    _refuse(processes)
    asked = _Question(model, batch, cluster, memory, loss_fn, optimizer, ranks, told, processes)
    with priced_by(cluster), uncollected():
        said = as_plan(plan)
        search = _sought if said is not None and leaves_degrees(said) else _chosen
        trying, within = search(said, asked)
        best, tried, limit = trying.best, trying.tried, within.limit
        if best is None or best.step is None or best.checked is None:
            raise nothing_fits(tried, limit)
        checked = replace(best.checked, report=with_idle(best.checked.report, best.step))
        prediction = predicted(best.step, checked, batch, grids_of(best.of.plan, ranks, model).whole.size)
        text = answer(best.step, trying.meaning(best.of.plan), checked.report)
    most = within.alive(checked.stays)
    line = "" if most is None else f"{ExpectAtMost('memory', int(most))}"
    made = FoundPlan.read(text if not line or f"{line}\n" in text else f"{text}{line}{within.remark}\n")
    object.__setattr__(made, "checked", checked)
    object.__setattr__(made, "prediction", prediction)
    object.__setattr__(made, "found", best.of.name)
    object.__setattr__(made, "floor", 0.0 if trying.opened is None else max(0.0, tried[0].bound))
    object.__setattr__(made, "runners_up", runners_up(tried, best, limit))
    return made


def _refuse(processes: int) -> None:
    if isinstance(processes, bool) or processes not in (1, 2):
        raise SbpError(
            f"flow.find_plan: processes={processes!r}\n  give it one or two: the second works ahead of the first"
        )
    if processes == 2 and not CAN_FORK:
        raise SbpError("flow.find_plan: processes=2 is a fork of this one, as on Linux\n  leave it out")


class _Question(NamedTuple):
    """All that the planner was asked, but for the plan."""

    model: nn.Module
    batch: Any
    cluster: Cluster | str | Path | None
    memory: float | None
    loss_fn: Loss | None
    optimizer: Optimizer | Sequence[Optimizer] | None
    ranks: int | None
    told: Callable[[str], object]
    processes: int

    def trying(self, ranks: int | None, within: "_Within") -> Trying:
        return Trying(self.model, self.batch, self.loss_fn, self.optimizer, ranks, within.limit, within.gaps)


class _Within(NamedTuple):
    """Bytes of a rank within which to stay, the gaps that count against them, and a remark where nobody gave them."""

    limit: float | None
    gaps: float = 0.0
    remark: str = ""

    def alive(self, stays: float) -> float | None:
        """Bytes that may be alive, where so many stay and only the others have gaps."""
        if self.limit is None:
            return None
        return min(self.limit, stays) + max(0.0, self.limit - stays) / (1 + self.gaps)


def _chosen(said: PlanText | None, asked: _Question) -> tuple[Trying, _Within]:
    """The candidates of a grid that were tried, and the limit."""
    model, ranks = asked.model, asked.ranks
    given = _given(said, asked.cluster, ranks)
    within = _within(given, asked.memory, device_of(given, ranks, model))
    trying, limit, alive = asked.trying(ranks, within), within.limit, within.alive(0)

    def attempt(one: Candidate) -> Checked | None:
        tried = trying.add(one)
        asked.told(f"{one.name}: {said_of(tried)}")
        return tried.checked

    for number, one in enumerate(candidates(given, model)):
        found = attempt(one)
        first = trying.tried[0]
        if number == 0 and limit is not None and first.step is not None and found is not None and first.taken > limit:
            # However weights are cut, a rank has its share of them all the time.
            alive = within.alive(RestingBytes.of(first.step).whole / grids_of(given, ranks, model).whole.size)
            assert alive is not None, "there is a limit"
            in_parts(given, model, alive, found, samples_of(asked.batch), attempt)
            for other in within_limit(given, model, alive):
                attempt(other)
            if leaves_all(given):
                offloading(given, model, alive, found, attempt)
    if trying.best is None and alive is not None and trying.opened:
        for name, text in last_ways(given, model, alive).items():
            if trying.best is None:
                attempt(Candidate(name, Plan.read(text)))
    return trying, within


def _sought(said: PlanText | None, asked: _Question) -> tuple[Trying, _Within]:
    """The degrees that were tried, and the limit."""
    assert said is not None
    kind, size, node = _ranks_of(said, asked.cluster, asked.ranks)
    space = space_of(said, asked.model, samples_of(asked.batch), kind, size, node, words_a_sample(asked.batch))
    within = _within(said, asked.memory, default_cluster(space.kind).device)
    trying = asked.trying(size, within)
    optimizer = asked.optimizer
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    Seeking(space, trying, asked.told, loss_fn=asked.loss_fn, optimizers=given, processes=asked.processes).run()
    return trying, within


def nothing_fits(tried: Sequence[TriedPlan], limit: float | None) -> SbpError:
    """The error where no plan that was tried is an answer."""
    known = [(int(one.taken), one.of.name) for one in tried if one.checked is not None]
    step = next((one.step for one in tried if one.step is not None), None)
    if step is None or limit is None or not known:
        return SbpError(tried[0].why or f"no plan that was tried fits into {volume(limit or 0)} a rank")
    memory, name = min(known)
    return NothingFits(limit, f"{volume(memory)}: {name}", RestingBytes.of(step))


def _within(given: PlanText, memory: float | None, device: Device) -> _Within:
    """The limit that somebody gave, of bytes that are alive; else what the cluster's device has room for."""
    said = [memory, *(s.memory for s in given.statements if isinstance(s, Limit))]
    for limit in said:
        if limit is not None:
            return _Within(limit)
    return _Within(None) if device.room == inf else _Within(device.room, GAPS, f"  # {room(device)}")


def _given(said: PlanText | None, which: Cluster | str | Path | None, ranks: int | None) -> Plan:
    """The plan that is to be filled in; one without a grid, or none, gets that of the cluster's levels."""
    if said is None:
        return Plan.read(_grid(which, ranks))
    if any(isinstance(line, Grid) for line in said.statements):
        return Plan.read(said.text, said.name)
    return Plan.read(f"{_grid(which, ranks)}\n{said.text}", said.name)


def _grid(which: Cluster | str | Path | None, ranks: int | None) -> str:
    """A grid with an axis `data`, along which batches are cut, and inside of hosts `tensor` where there are several."""
    kind, size, node = _ranks_of(None, which, ranks)
    if node == 1 or size <= node or size % node:
        return f"grid {kind} (data={size})"
    return f"grid {kind} (data={size // node}, tensor={node})"


def _ranks_of(said: PlanText | None, which: Cluster | str | Path | None, ranks: int | None) -> tuple[str, int, int]:
    """The kind of device, how many ranks there are, and how many of them in a node."""
    card = card_here()
    cards = card.count if card else 0
    here = default_cluster(card.name if card else "cpu")
    there = here if which is None else which if isinstance(which, Cluster) else cluster(which)
    kind = there.device.type
    if ranks is None and said is not None:
        ranks = _said_ranks(said)
    if which is None:
        ranks = ranks or world().size
    if ranks is None and kind == "cpu":
        raise SbpError(
            "flow.find_plan: nothing says on how many ranks the model is to run, and there is no card here\n"
            '  give it ranks=4 (--ranks 4), a grid, as in plan="grid (data=4)", or what to plan for, as in '
            'cluster="h100x8" (--gpus 8xH100)'
        )
    several = len(there.levels) > 1
    # Hosts of unequal numbers of ranks have no axis of their own.
    node = ranks or 1 if not several else 1 if there.levels[0].groups else there.levels[0].size
    known = which is not None and "*" in str(which)
    return kind, ranks or (there.capacity[-1] if known else min(node, cards) if which is None and cards else node), node


def _said_ranks(said: PlanText) -> int | None:
    """The ranks of a grid all of whose sizes are said."""
    axes = [axis for s in said.statements if isinstance(s, Grid) for axis in s.axes if axis.folds is None]
    sizes = [axis.size for axis in axes if isinstance(axis.size, int)]
    return prod(sizes) if axes and len(sizes) == len(axes) else None
