"""The assignment of a plan to one model: which line counts for which module, parameter and argument.

Every pattern has to meet something, and no two lines may ask for what cannot both be. Where several lines meet the same
thing the last counts, axis by axis. The meaning of a line by itself is in its statement.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor, nn
from torch.optim import Optimizer

from ...placement.errors import SbpError, SbpflowError
from ...sbp import Split
from ..graph.optimizer.adopt import owner_of
from ..graph.options import OptionError
from ..model.flows import FlowError
from .grids import Grids
from .language.plan_text import PlanText
from .language.statement import Assigning, LineFault, Meaning, Pinned, around, outermost
from .language.statements import Statement
from .language.statements.place import Place

__all__ = ["Assignment", "assignment"]


@dataclass(kw_only=True)
class Assignment(Meaning):
    """The lines of a plan for one model, with the plan that shows them where they are wrong."""

    plan: PlanText
    taken: dict[int, Statement] = field(default_factory=dict)  # by the id of a line, the `take` that it is of
    kept: list[Statement] = field(default_factory=list)  # these lines, so that their ids stay theirs

    def whole(self, name: str) -> bool:
        """Whether a parameter is wholly the planner's: by a line, or under a limit as no line names it."""
        return name in self.free or ("memory" in self.options and not self.rests["weights"].get(name))

    def wrong(self, line: Statement, part: str, message: str) -> SbpError:
        """The error of a line; one of the config's own plan is shown by the line that takes it."""
        of = self.taken.get(id(line))
        if of is None:
            return self.plan.wrong(line, part, message)
        return self.plan.wrong(of, "what", f"{line}: {message}")

    def conflict(self, a: Statement, b: Statement, message: str) -> SbpError:
        """The error of two lines that cannot both be."""
        first, second = (self.taken.get(id(line), line) for line in (a, b))
        if first is second:
            return self.plan.wrong(first, "what", message)
        return self.plan.conflict(first, second, message)

    def fault(self, fault: LineFault) -> SbpError:
        """The error of a line that a model cannot follow."""
        if fault.other is not None:
            return self.conflict(fault.line, fault.other, fault.message)
        return self.wrong(fault.line, fault.part, fault.message)

    def shown(self, error: FlowError | OptionError) -> SbpflowError:
        """The error of a flow that was found when a step was captured, or of an option beside others, at the line that
        says it."""
        if isinstance(error, OptionError):
            line = self.saying.get(error.option)
            return error if line is None else self.wrong(line, error.option, str(error))
        axes = self.inputs.get(error.of) if error.side == "argument" else self.flows.get((error.of, error.side))
        if not axes:  # it was noted by hand
            return error
        axis, pinned = next(reversed(axes.items()))
        return self.wrong(pinned.by, f"axis:{axis}", str(error))

    @cached_property
    def left_open(self) -> frozenset[str]:
        """The parameters that are left to the planner, along an axis at least."""
        weights = self.rests["weights"]
        part = {name for name, axes in weights.items() if any(pinned.entry is None for pinned in axes.values())}
        return frozenset(part.union(filter(self.whole, self.parameters)))


def assignment(plan: PlanText, model: nn.Module, grids: Grids, optimizers: Iterable[Optimizer] = ()) -> Assignment:
    """The meaning of a plan's lines for a model that these optimizers train; nothing is changed."""
    made = Assignment(grids, plan=plan)
    to = Assigning(model, made, partial(_stepped, [*optimizers]))
    try:
        for statement in plan.statements:
            for line in _stands_for(statement, to, made):
                line.assign(to)
    except LineFault as fault:
        raise made.fault(fault) from None
    _Checking(made, to.reach).check()
    return made


def _stepped(optimizers: Iterable[Optimizer]) -> dict[int, str]:
    """The optimizers that have stepped parameters, by the ids of these; some make states before a first step."""
    held = ((type(each).__name__, value, state) for each in optimizers for value, state in each.state.items())
    return {id(owner_of(value)): name for name, value, state in held if state and not _is_new(state)}


def _is_new(state: Mapping[str, object]) -> bool:
    step = state.get("step")
    return not step.is_meta and not step.any() if isinstance(step, Tensor) else step == 0


def _stands_for(statement: Statement, to: Assigning, made: Assignment) -> Iterable[Statement]:
    """The line itself, or the lines that the model's own config has in its place."""
    lines = statement.stands_for(to)
    if lines is None:
        return [statement]
    stand_for = PlanText.read("\n".join(lines), name=str(statement)).statements
    made.taken.update((id(line), statement) for line in stand_for)
    made.kept += stand_for
    return stand_for


class _Checking:
    """The lines of an assignment against each other; `reach` has the parameters that each meets, by its id."""

    def __init__(self, made: Assignment, reach: Mapping[int, list[str]]) -> None:
        self.made, self.grids, self.reach = made, made.grids, reach

    def check(self) -> None:
        """Refuse lines that cannot both be."""
        made = self.made
        at = [*((piped.by, piped.axis) for piped in made.pipes), *made.places.values()]
        staged = {axis: line for line, axis in at}
        for axes in (*(a for table in made.rests.values() for a in table.values()), *made.flows.values()):
            for axis, pinned in axes.items():
                if axis in staged:
                    raise self.made.conflict(
                        staged[axis], pinned.by, f"layers are at places of {axis}, so that nothing can lie along it"
                    )
        for path, (line, _) in made.places.items():
            for piped in made.pipes:
                if any(around(layer, path) or around(path, layer) for layer in piped.layers):
                    raise self.made.conflict(piped.by, line, f"{path} is among the layers of the pipeline")
        self.fill_places()
        self.leave_folded()

    def fill_places(self) -> None:
        """Refuse a pipeline whose lines leave out places of the axis, where nobody would have anything to do."""
        made = self.made
        if not made.pipes:
            return
        last = made.pipes[-1]
        placed = {line.at for line, axis in made.places.values() if isinstance(line, Place) and axis == last.axis}
        used = placed.union(*(of.places for of in made.pipes))
        idle = [str(at) for at in range(self.grids.size(last.axis)) if at not in used]
        if idle:
            raise made.wrong(
                last.by,
                "places",
                f"no layers are at {last.axis}={', '.join(idle)}\n"
                f"  make {last.axis} smaller, or give its places to a line, as in {last.axis}[{idle[0]}:]",
            )

    def leave_folded(self) -> None:
        """Nothing of an axis is left where a fold takes all of it. Lines for other parameters too pass over those of
        the folded modules, and lines for these alone have to name the fold."""
        made = self.made
        folds = {path: self.grids.folds[made.folded[path]] for path in outermost(made.folded)}
        gone = {path: of for path, of in folds.items() if self.grids.size(str(of.folds)) == of.size}
        for table in made.rests.values():
            for name, axes in list(table.items()):
                of = next((of for path, of in gone.items() if around(path, name)), None)
                pinned = None if of is None else axes.get(str(of.folds))
                if of is None or pinned is None:
                    continue
                if not all(any(around(path, other) for path in gone) for other in self.reach[id(pinned.by)]):
                    del axes[str(of.folds)]
                    if not axes:
                        del table[name]
                    continue
                self.check_folds(axes)
                raise made.wrong(
                    pinned.by,
                    f"axis:{of.folds}",
                    f"{name} is on the ranks of {of.folds} as {of.name}, which folds all of it\n"
                    f"  write {of.name}={pinned.entry!r}",
                )
        for axes in made.flows.values():
            self.check_folds(axes)

    def check_folds(self, axes: Mapping[str, Pinned]) -> None:
        """An axis and all of what it folds cannot both be used."""
        for axis, pinned in axes.items():
            fold = self.grids.folds.get(axis)
            other = axes.get(fold.folds) if fold is not None and fold.folds is not None else None
            if fold is None or other is None or not isinstance(other.entry, Split):
                continue
            if self.grids.size(str(fold.folds)) == fold.size:
                raise self.made.conflict(
                    other.by,
                    pinned.by,
                    f"{axis} and {fold.folds} are the same ranks: one tensor lies along one of them",
                )
