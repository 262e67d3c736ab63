"""The planner: the cheapest plan of a model on a cluster, as a plan, with what comes next and why it costs more.

Signatures are chosen all together by the graph's own chooser. Beside that the plans that people write by hand are tried
(data parallel, ZeRO-1, 2 and 3, the config's tensor parallel plan, blocks run again), so that the answer never costs
more than one of them that fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...boxing.picture.palette import duration, volume
from ...placement import Cluster, cluster, default_cluster
from ...placement.errors import SbpError, SbpflowError
from ..graph.capture.likeness import blocks_of
from .answer import answer
from .assignment import assignment
from .check import Checked, Loss, priced_by, stepped
from .grids import grids_of
from .language.statements import Grid, Limit, Rest, Seek, TakePlan
from .plan import Plan

__all__ = ["FoundPlan", "OtherPlan", "plan"]


@dataclass(frozen=True, eq=False)
class OtherPlan:
    """Another plan that was tried: how many times the seconds of the answer it takes, or why it cannot be."""

    name: str
    plan: Plan
    checked: Checked | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


class FoundPlan(Plan):
    """The plan that the planner found; `checked` is what it costs, `runners_up` what else was tried.

    No plan that has equal layers alike takes less than `floor` seconds, with however much memory; 0: not known.
    """

    checked: Checked
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
        proved = "" if not self.floor else f"; {less}" if self.gap > 1e-9 else "; no plan takes less"
        return "\n".join([f"found: {best}{proved}", *(f"  {one}" for one in self.runners_up)])


@dataclass(frozen=True)
class _Tried:
    name: str
    plan: Plan
    checked: Checked | None
    answer: str
    error: str
    floor: float = 0.0


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
        limits = [memory, *(s.memory for s in given.statements if isinstance(s, Limit))]
        limit = next((each for each in limits if each is not None), None)
        tried = []
        for name, one in _candidates(given, model, limit):
            tried.append(_tried(name, one, model, batch, loss_fn, optimizer, ranks))
            told(f"{name}: {_said(tried[-1])}")
    fits = [one for one in tried if one.checked is not None and (limit is None or one.checked.memory <= limit)]
    if not fits:
        raise SbpError(tried[0].error or f"no plan that was tried fits into {volume(limit or 0)} a rank")
    best = min(fits, key=lambda one: one.checked.seconds if one.checked else 0.0)
    assert best.checked is not None
    made = FoundPlan.read(best.answer)
    object.__setattr__(made, "checked", best.checked)
    object.__setattr__(made, "floor", tried[0].floor)
    others = sorted((one for one in tried if one is not best), key=lambda one: _rank(one, limit))
    listed = tuple(OtherPlan(one.name, one.plan, one.checked, _why(one, best, limit)) for one in others)
    object.__setattr__(made, "runners_up", listed)
    return made


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


def _candidates(given: Plan, model: nn.Module, limit: float | None) -> Iterator[tuple[str, Plan]]:
    """Plans to try: the given one with all left open that it does not say, and if it says nothing of weights those that
    people write."""
    if any(isinstance(s, Seek) for s in given.statements):
        raise given.wrong(next(s for s in given.statements if isinstance(s, Seek)), "what", "seek is not built yet")
    text = "\n".join(line.text for line in given.lines if not isinstance(line.statement, Limit))
    within = f"\nlimit memory {int(limit)} B" if limit is not None else ""
    says = any(isinstance(s, Rest | TakePlan) for s in given.statements)
    layers = _layers(model)
    again = f"\nrecompute {layers}" if layers else ""
    grid = next(s for s in given.statements if isinstance(s, Grid))
    axes = [axis.name for axis in grid.axes if axis.folds is None]
    if says:
        yield "as said", Plan.read(text + within)
        return
    yield "chosen", Plan.read(f"{text}\n**: ?{within}")
    everywhere = ", ".join(f"{axis}=S(0)" for axis in axes)
    hand = {
        "data parallel": "",
        "ZeRO-1": f"states **: {everywhere}",
        "ZeRO-2": f"{{grads,states}} **: {everywhere}",
        "ZeRO-3": f"**: {everywhere}",
    }
    if getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None):
        hand["tensor parallel by its config"] = f"take tp_plan over {axes[-1]}"
        if len(axes) > 1:
            rest = ", ".join(f"{axis}=S(0)" for axis in axes[:-1])
            hand["tensor parallel by its config, ZeRO-1"] = f"take tp_plan over {axes[-1]}\nstates **: {rest}"
    yield from ((name, Plan.read(f"{text}\n{lines}")) for name, lines in hand.items())
    if limit is not None and again:
        yield from ((f"{name}, blocks run again", Plan.read(f"{text}\n{lines}{again}")) for name, lines in hand.items())


def _layers(model: nn.Module) -> str:
    """The pattern of the outermost repeated layers, if there are some."""
    held = list(model.modules())
    paths = {id(part): path for path, part in model.named_modules()}
    found = sorted(set(blocks_of(paths, held).values()), key=lambda path: path.count("."))
    outer = [path for at, path in enumerate(found) if not any(path.startswith(f"{up}.") for up in found[:at])]
    families = dict.fromkeys(path.rpartition(".")[0] for path in outer)
    return f"{{{','.join(families)}}}.*" if len(families) > 1 else "".join(f"{family}.*" for family in families)


def _tried(name: str, one: Plan, model: nn.Module, batch: Any, *how: Any) -> _Tried:
    loss_fn, optimizer, ranks = how
    try:
        step, checked = stepped(one, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks)
        floor = 0.0 if step.plan.pieces else step.plan.decided.floor  # in pipelines it is of one micro-batch
        return _Tried(name, one, checked, answer(step, assignment(one, model, grids_of(one, ranks))), "", floor)
    except SbpflowError as error:
        return _Tried(name, one, None, "", str(error))


def _said(one: _Tried) -> str:
    if one.checked is None:
        return one.error.partition("\n")[0]
    return f"{duration(one.checked.seconds)}, {volume(one.checked.memory)}"


def _rank(one: _Tried, limit: float | None) -> tuple[bool, float]:
    if one.checked is None:
        return True, float("inf")
    return limit is not None and one.checked.memory > limit, one.checked.seconds


def _why(one: _Tried, best: _Tried, limit: float | None) -> str:
    """The cost of another plan beyond the best, and in which part of the step."""
    if one.checked is None or best.checked is None:
        return one.error.partition("\n")[0]
    if limit is not None and one.checked.memory > limit:
        return f"{duration(one.checked.seconds)}, but takes {volume(one.checked.memory)} of {volume(limit)}"
    more = one.checked.seconds - best.checked.seconds
    mine, other = one.checked.report, best.checked.report
    parts = {
        "computing": (mine.compute or 0.0) - (other.compute or 0.0),
        "moves that all wait for": (mine.exposed or 0.0) - (other.exposed or 0.0),
        "the optimizer": mine.update - other.update,
    }
    most = max(parts, key=lambda part: parts[part])
    share = more / best.checked.seconds if best.checked.seconds else 0.0
    said = f"{duration(one.checked.seconds)}, {share:+.1%}"
    return f"{said}, {duration(parts[most])} more for {most}" if parts[most] > 0 else said
