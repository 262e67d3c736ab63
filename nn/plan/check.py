"""Checks of a plan without a device: a step is planned, the model stays as it is, and nothing is run.

The step is held to the account of memory, the price of moves and the course of its micro-batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ...boxing.figures import duration, volume
from ...boxing.graph.measures import Held
from ...boxing.graph.move_table import MoveTotal, totals
from ...boxing.graph.report.report import Report
from ...boxing.html import paragraph, table
from ...placement import Cluster, cluster, default_cluster, use_cluster
from ...placement.errors import SbpError
from ...placement.hardware import GAPS, KEPT_FREE, Device
from ...sbp.joint.solver.propagation import Changed, changed
from ..explanations.step_report import explained
from ..graph.capture.surroundings.garbage import uncollected
from ..graph.captures import Captures
from ..graph.compiled import CompiledGraph
from ..graph.compiler.backends import Backend
from ..graph.options import GivenOptions, OptionError
from ..graph.step import Step
from ..model.flows import FlowError
from .assignment import assignment
from .expect import Expectation, expected, findings
from .grids import grids_of
from .language.plan_text import PlanText
from .language.statements import ExpectAtMost
from .notes import kept_notes, noted, options_of

__all__ = [
    "Checked",
    "check",
    "checked_step",
    "device_of",
    "planned_step",
    "priced_by",
    "room",
    "samples_of",
    "stepped",
    "tensors_of",
    "words_a_sample",
    "words_of",
]

Loss = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Checked:
    """A plan that was checked: seconds of a step, bytes of the fullest rank, its moves, and each `expect` line."""

    plan: PlanText
    report: Report
    seconds: float
    memory: int
    findings: Sequence[Expectation]
    device: Device
    changed: Changed | None = None  # from what lines say by themselves, where flows were chosen

    @property
    def fits(self) -> bool:
        """Whether every rank stays within the memory of its device, with gaps, and less what is kept free of it."""
        return self.taken(GAPS) <= self.device.room

    def taken(self, gaps: float) -> float:
        """The most bytes that a rank takes, where what comes and goes has gaps of such a share of it."""
        return max((held.total + gaps * held.passing for held in self._ranks), default=0.0)

    @property
    def stays(self) -> int:
        """The bytes of weights, gradients, their sums and states on the rank with most of these."""
        return max((held.total - held.passing for held in self._ranks), default=0)

    @property
    def _ranks(self) -> Iterable[Held]:
        return self.report.memory.ranks.values() if self.report.memory else ()

    @cached_property
    def moves(self) -> Sequence[MoveTotal]:
        """Totals of the moves, by direction and collective."""
        return totals(self.report.moves)

    def __str__(self) -> str:
        lines = [
            f"{self.plan.name or 'plan'}: {duration(self.seconds)} a step, {volume(self.memory)} on the fullest rank",
            *([f"  priced by {self.report.devices}"] if self.report.devices else ()),
            *(f"  {m.direction:9} {m.count:5} {m.route}: {volume(m.bytes)}, {duration(m.seconds)}" for m in self.moves),
            *([] if self.fits else [f"  does not fit: {room(self.device)}"]),
            *([f"  frozen {self.report.frozen}"] if self.report.frozen else ()),
            *(f"  {line}" for line in self.report.idle),
            *([f"  {self.changed}"] if self.changed else ()),
            *(f"  {finding}" for finding in self.findings),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [(m.direction, m.route, str(m.count), volume(m.bytes), duration(m.seconds)) for m in self.moves]
        asked = [("holds" if f.holds else "FAILS", str(f.line), f.found) for f in self.findings]
        parts = [
            paragraph(str(self).splitlines()[0], strong=True),
            *([] if self.fits else [paragraph(f"does not fit: {room(self.device)}", strong=True)]),
            *([table(("", "expect", "found"), asked)] if asked else []),
            table(("moves", "route", "many", "a rank", "time"), rows, (2, 3, 4))
            if rows
            else paragraph("nothing moves"),
            *([paragraph(str(self.changed))] if self.changed else []),
            *(paragraph(line) for line in self.report.idle),
            self.report.map(),
        ]
        return "".join(parts)

    def dict(self) -> dict[str, Any]:
        """All of it in lists, dicts, numbers and text, as json has them."""
        return {
            "seconds": self.seconds,
            "memory": self.memory,
            "fits": self.fits,
            "moves": [
                {"direction": m.direction, "route": m.route, "count": m.count, "bytes": m.bytes, "seconds": m.seconds}
                for m in self.moves
            ],
            "changed": self.changed and self.changed._asdict(),
            "expect": [{"line": str(f.line), "found": f.found, "holds": f.holds} for f in self.findings],
            "report": self.report.dict(),
        }


def check(
    plan: PlanText,
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    cluster: Cluster | str | Path | None = None,
    ranks: int | None = None,
    strict: bool = True,
    backend: Backend = "auto",
) -> Checked:
    """A plan held against a model and a batch; where `strict`, an `expect` line that fails is an error."""
    with priced_by(cluster):
        _, checked = stepped(plan, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, backend=backend)
    if strict:
        expected(plan, checked.findings)
    return checked


def stepped(
    plan: PlanText,
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ranks: int | None = None,
    backend: Backend = "auto",
) -> tuple[Step, Checked]:
    """The planned step of a plan, and what is found of it."""
    step = planned_step(plan, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, backend=backend)
    return step, checked_step(plan, step, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks)


@uncollected()
def checked_step(
    plan: PlanText,
    step: Step,
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ranks: int | None = None,
    idle: bool = True,
) -> Checked:
    """The findings on a plan's planned step; axes that do nothing are looked for only if `idle` asks for it."""
    report = explained(step, idle)
    seconds = report.predicted or 0.0
    others: dict[str, float] = {}
    for line in plan.statements:
        if isinstance(line, ExpectAtMost) and line.of is not None and line.of not in others:
            other = type(plan).load(_beside(plan, line.of))
            how = step.plan.options.backend
            there = planned_step(other, model, batch, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, backend=how)
            others[line.of] = explained(there).predicted or 0.0
    found = findings(plan, step, others)
    device = device_of(plan, ranks, model)
    decided, fullest = step.plan.decided, report.memory.fullest if report.memory else 0
    apart = None if step.plan.options.hold else changed(decided.formulated, decided.logical, decided.solution.choice)
    return Checked(plan, report, seconds, fullest, found, device, apart)


def device_of(plan: PlanText, ranks: int | None, model: nn.Module) -> Device:
    """The device that others wait for on the ranks of a plan."""
    whole = grids_of(plan, ranks, model).whole
    return default_cluster(whole.type).device_of(whole)


def room(device: Device) -> str:
    """Words for what a plan may take of a device."""
    if device.memory == inf:
        return f"nobody says how much memory {device.name} has"
    free = f"{device.name} has {volume(int(device.memory))}, of which {KEPT_FREE:.0%} are kept free"
    return f"{free}; what comes and goes takes {GAPS:.0%} more, gaps and all"


def priced_by(which: Cluster | str | Path | None) -> Any:
    """The prices of a cluster, given by itself, its name or its file; those in use where nothing is said."""
    return nullcontext() if which is None else use_cluster(which if isinstance(which, Cluster) else cluster(which))


def planned_step(
    plan: PlanText,
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: Loss | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ranks: int | None = None,
    captures: Captures | None = None,
    backend: Backend = "auto",
) -> Step:
    """The step that a plan gives, of which nothing runs; the notes of the model are afterwards what they were.
    `captures` are those of other plans for the same model, batch and loss."""
    args, kwargs = arguments(batch)
    with kept_notes(model):
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
        made = assignment(plan, model, grids_of(plan, ranks, model), given)
        noted(made, model)
        listed: Any = optimizer if optimizer is not None else _usual(model)
        options: GivenOptions = {**options_of(made), "backend": backend}
        how = model, loss_fn or _usual_loss, listed, options, captures
        try:
            graph: CompiledGraph[Any, ..., Any] = CompiledGraph(*how)
            return graph.step_for(*args, **kwargs)
        except (FlowError, OptionError) as error:
            raise made.shown(error) from None


def arguments(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch as arguments: a tensor, several in a tuple or list, or named ones in a dict."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch that may be cut by samples."""
    args, kwargs = arguments(batch)
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]


def samples_of(batch: Any) -> int:
    """The samples of a batch, as far as its tensors agree: the least first dim."""
    return min(map(len, tensors_of(batch)), default=1)


def words_of(batch: Any) -> int:
    """The words of a batch: those of its largest matrix of whole numbers, such as token ids; 0 where it has none."""
    return max((x.numel() for x in tensors_of(batch) if not x.is_floating_point() and x.dim() == 2), default=0)


def words_a_sample(batch: Any) -> int:
    """The words of each sample of a batch, 0 where it is of something else."""
    given = tensors_of(batch)
    words = {x.shape[1] for x in given if x.dim() == 2 and not (x.is_floating_point() or x.is_complex())}
    return words.pop() if len(words) == 1 and all(x.dim() == 2 for x in given) else 0


def _usual(model: nn.Module) -> Optimizer | None:
    """The optimizer that is meant where none is given: two states of each parameter, in one kernel."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, fused=all(p.is_floating_point() for p in trained)) if trained else None


def _usual_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The loss where none is given: the model's own, or the mean of its first result of floats.

    A cache of keys and values for the next word is left out, because without it equal layers are captured once."""
    if "use_cache" in signature(model.forward).parameters:
        kwargs.setdefault("use_cache", False)
    result = model(*args, **kwargs)
    loss = getattr(result, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    left = [result]
    while left:
        part = left.pop(0)
        if isinstance(part, Tensor) and part.is_floating_point():
            return part.float().mean()
        left += part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    raise SbpError(
        f"check: {type(model).__name__} returns no tensor of floats, of which there could be a loss\n"
        "  give loss_fn(model, *batch)"
    )


def _beside(plan: PlanText, name: str) -> Path:
    """A file that a plan names: beside its own."""
    return Path(plan.name).parent / name if plan.name else Path(name)
