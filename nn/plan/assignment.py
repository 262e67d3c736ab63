"""The assignment of a plan to one model: which line counts for which module, parameter and argument.

Every pattern has to meet something, and no two lines may ask for what cannot both be; of lines that meet the same thing
the last counts, axis by axis.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from ...placement.errors import SbpError, SbpflowError
from ...sbp import Partial, Sbp, Split
from ..model.flows import FlowError, is_called
from ..model.paths import met, near
from .grids import Grids
from .language.plan_text import PlanText
from .language.statements import (
    AxisEntries,
    Cast,
    Compress,
    Flow,
    Input,
    Inside,
    Kind,
    Limit,
    Offload,
    Pipe,
    Place,
    Recompute,
    Rest,
    Seek,
    Statement,
    TakePlan,
)
from .taken import taken

__all__ = ["Assignment", "Axes", "NotedLine", "Pinned", "assignment", "outermost"]


CORE = ".core"


class Pinned(NamedTuple):
    """An entry that is said along one axis, and by which line; None leaves it to the planner."""

    entry: Sbp | None
    by: Statement


Axes: TypeAlias = dict[str, Pinned]
NotedLine: TypeAlias = Recompute | Cast | Offload | Inside | Compress


@dataclass
class Assignment:
    """By names of parameters and paths of modules, in the order of the lines."""

    plan: PlanText
    grids: Grids
    rests: dict[Kind, dict[str, Axes]] = field(default_factory=lambda: {"weights": {}, "grads": {}, "states": {}})
    free: dict[str, Statement] = field(default_factory=dict)  # parameters that are the planner's along all axes
    flows: dict[tuple[str, str], Axes] = field(default_factory=dict)  # by module, and "result" or "input"
    inputs: dict[str, Axes] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)  # modules that see an axis as another
    places: dict[str, Place] = field(default_factory=dict)
    pipe: Pipe | None = None
    layers: tuple[str, ...] = ()  # of the pipe
    marks: list[tuple[NotedLine, list[str]]] = field(default_factory=list)
    memory: int | None = None
    taken: dict[int, Statement] = field(default_factory=dict)  # by the id of a line, the `take` that it is of
    kept: list[Statement] = field(default_factory=list)  # these lines, so that their ids stay theirs
    parameters: tuple[str, ...] = ()

    def whole(self, name: str) -> bool:
        """Whether a parameter is wholly the planner's: by a line, or under a limit as no line names it."""
        return name in self.free or (self.memory is not None and not self.rests["weights"].get(name))

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

    def shown(self, error: FlowError) -> SbpflowError:
        """The error of a flow that was found when a step was captured, at the line that says it."""
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


def assignment(plan: PlanText, model: nn.Module, grids: Grids) -> Assignment:
    """The meaning of a plan's lines for a model; nothing is changed."""
    return _Assigning(plan, model, grids).read()


class _Assigning:
    def __init__(self, plan: PlanText, model: nn.Module, grids: Grids) -> None:
        self.plan, self.model, self.grids = plan, model, grids
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.reach: dict[int, list[str]] = {}  # by the id of a line, the parameters that it meets
        self.made = Assignment(plan, grids, parameters=tuple(self.parameters))

    def read(self) -> Assignment:
        for statement in self.plan.statements:
            for line in self.expanded(statement):
                self.line(line)
        self.check()
        return self.made

    def expanded(self, statement: Statement) -> Iterable[Statement]:
        """The line itself, or the lines that the model's own config has in its place."""
        if not isinstance(statement, TakePlan):
            return [statement]
        self.known(statement, statement.over)
        try:
            lines = taken(self.model, statement.over, statement.what)
        except SbpError as error:
            raise self.made.wrong(statement, "what", str(error)) from None
        stand_for = PlanText.read("\n".join(lines), name=str(statement)).statements
        self.made.taken.update((id(line), statement) for line in stand_for)
        self.made.kept += stand_for
        return stand_for

    def line(self, line: Statement) -> None:
        made = self.made
        if isinstance(line, Rest):
            self.rest(line)
        elif isinstance(line, Flow):
            for path in self.met_flowing(line, line.path):
                self.pin(made.flows.setdefault((path, line.of), {}), line, line.entries)
                self.fold(path, line, line.entries)
        elif isinstance(line, Input):
            self.pin(made.inputs.setdefault(line.name, {}), line, line.entries)
        elif isinstance(line, Place):
            self.place(line)
        elif isinstance(line, Pipe):
            self.pipe(line)
        elif isinstance(line, Recompute):
            self.recompute(line)
        elif isinstance(line, Inside):
            made.marks.append((line, self.met_modules(line, line.path)))
            for axis in line.over:
                self.known(line, axis)
        elif isinstance(line, Cast | Offload):
            modules, parameters = self.met(line, line.path)
            saves = isinstance(line, Offload) and line.what == "saved" and modules  # as modules do, and no parameter
            made.marks.append((line, outermost(modules) + ([] if saves else parameters)))
        elif isinstance(line, Compress):
            modules, parameters = self.met(line, line.path)
            made.marks.append((line, modules if line.what == "hops" else outermost(modules) + parameters))
            if line.over is not None:
                self.known(line, line.over)
        elif isinstance(line, Limit):
            made.memory = line.memory
        elif isinstance(line, Seek):
            raise self.made.wrong(
                line,
                "what",
                "seek is not built yet: degrees and schedules are not looked for\n"
                "  say them, as in grid (pipe=2, data=*) and pipe ... by 1f1b, 8 micro-batches",
            )

    def rest(self, line: Rest) -> None:
        """Parameters that are named, and those of modules that are."""
        modules, named = self.met(line, line.path)
        inside = {f"{path}." if path else "" for path in modules}
        names = [n for n in self.parameters if n in {*named} or any(n.startswith(head) for head in inside)]
        if not names:
            raise self.made.wrong(line, "path", f"{line.path} has no parameters\n  name a module that has some")
        self.reach[id(line)] = names
        many = len(names) > 1 or bool(modules)
        for name in names:
            entries = self.fitting(line, name, line.entries, many=many)
            for kind in line.kinds:
                self.pin(self.made.rests[kind].setdefault(name, {}), line, entries)
            if line.entries is None:
                self.made.free[name] = line
            elif "weights" in line.kinds:
                self.made.free.pop(name, None)
            self.fold(name.rpartition(".")[0], line, line.entries)

    def fitting(self, line: Rest, name: str, entries: AxisEntries, *, many: bool) -> AxisEntries:
        """The line as it is for one parameter: where it is meant for many, one that has not this dim is left to be
        chosen, as the bias of a split product is, and one without dims is whole."""
        value = self.parameters[name]
        if entries is None or is_lazy(value):
            return entries
        found: list[tuple[str, Sbp | None]] = []
        for axis, entry in entries:
            if isinstance(entry, Partial):
                raise self.made.wrong(
                    line, f"axis:{axis}", f"{name} cannot rest as addends\n  write {axis}=B, or {axis}=S(0) to cut it"
                )
            if isinstance(entry, Split) and not -value.ndim <= entry.dim < value.ndim:
                if not many:
                    dims = f"dims 0 to {value.ndim - 1}" if value.ndim > 1 else f"{value.ndim or 'no'} dim"
                    raise self.made.wrong(
                        line, f"axis:{axis}", f"{entry!r} of {name} {tuple(value.shape)}, which has {dims}"
                    )
                if value.ndim:
                    found.append((axis, None))
                continue
            found.append((axis, entry))
        return tuple(found)

    def pin(self, axes: Axes, line: Statement, entries: AxisEntries) -> None:
        for axis, entry in entries if entries is not None else [(name, None) for name in self.grids.axes]:
            self.known(line, axis)
            axes[axis] = Pinned(entry, line)

    def known(self, line: Statement, axis: str) -> None:
        if axis not in self.grids.axes:
            meant = near(axis, self.grids.axes)
            raise self.made.wrong(
                line,
                f"axis:{axis}",
                f"the grid has no axis {axis}\n  "
                + (f"did you mean {meant}?" if meant else f"its axes are {', '.join(self.grids.axes)}"),
            )

    def fold(self, path: str, line: Statement, entries: AxisEntries) -> None:
        """A module of which an axis is named that folds another is on those ranks as that axis sees them."""
        for axis, _ in entries or ():
            if axis in self.grids.folds:
                self.made.folded[path] = axis

    def place(self, line: Place) -> None:
        self.known(line, line.axis)
        size = self.grids.size(line.axis)
        if not 0 <= line.at < size or line.axis in self.grids.folds:
            raise self.made.wrong(line, "at", f"{line.axis}={line.at}: the axis has places 0 to {size - 1}")
        for path in self.met_modules(line, line.path):
            self.made.places[path] = line

    def pipe(self, line: Pipe) -> None:
        self.known(line, line.over)
        if self.made.pipe is not None:
            raise self.made.conflict(self.made.pipe, line, "a plan has one pipeline")
        paths = self.met_modules(line, line.path)
        if len(paths) == 1 and isinstance(self.modules[paths[0]], nn.ModuleList | nn.Sequential):
            (around,) = paths
            paths = [f"{around}.{name}" if around else name for name in self.modules[around]._modules]
        self.made.pipe, self.made.layers = line, tuple(outermost(paths))

    def recompute(self, line: Recompute) -> None:
        """Modules, or their `core`: what attention makes of queries, keys and values, which in most is no module."""
        path, only = line.path, line.only
        if path.endswith(CORE) and not met(path, self.modules):
            path, only = path.removesuffix(CORE), ("attention",)
        modules = self.met_modules(line, path)
        self.made.marks.append((replace(line, path=path, only=only), modules))

    def met(self, line: Statement, path: str) -> tuple[list[str], list[str]]:
        """The modules and the parameters that a pattern meets; there has to be one."""
        modules, parameters = met(path, self.modules), met(path, self.parameters, self.modules)
        if not modules and not parameters:
            raise self.nothing(line, path, [*self.parameters, *filter(None, self.modules)])
        return modules, parameters

    def met_modules(self, line: Statement, path: str) -> list[str]:
        modules = met(path, self.modules)
        if not modules:
            raise self.nothing(line, path, filter(None, self.modules))
        return modules

    def met_flowing(self, line: Statement, path: str) -> list[str]:
        """Modules that are called, where a pattern also meets the lists that hold them."""
        modules = self.met_modules(line, path)
        return [name for name in modules if is_called(self.modules[name])] or modules

    def nothing(self, line: Statement, path: str, names: Iterable[str]) -> SbpError:
        meant = near(path.replace("**", "*"), names)
        kind = type(self.model).__name__
        fix = f"did you mean {meant}?" if meant else "see all names: print(flow.nn.annotations(model))"
        return self.made.wrong(line, "path", f"{kind} has nothing called {path}\n  {fix}")

    def check(self) -> None:
        """Refuse lines that cannot both be."""
        made, staged = self.made, dict[str, Statement]()
        if made.pipe is not None:
            staged[made.pipe.over] = made.pipe
        staged.update({line.axis: line for line in made.places.values()})
        for axes in (*(a for table in made.rests.values() for a in table.values()), *made.flows.values()):
            for axis, pinned in axes.items():
                if axis in staged:
                    raise self.made.conflict(
                        staged[axis], pinned.by, f"layers are at places of {axis}, so that nothing can lie along it"
                    )
        for path, line in made.places.items():
            if made.pipe is not None and any(_around(layer, path) or _around(path, layer) for layer in made.layers):
                raise self.made.conflict(made.pipe, line, f"{path} is among the layers of the pipeline")
        self.leave_folded()

    def leave_folded(self) -> None:
        """Where a fold takes all of an axis, nothing of that is left: lines for other parameters too pass over those of
        the folded modules, and lines for these alone have to name the fold."""
        made = self.made
        folds = {path: self.grids.folds[made.folded[path]] for path in outermost(made.folded)}
        gone = {path: of for path, of in folds.items() if self.grids.size(str(of.folds)) == of.size}
        for table in made.rests.values():
            for name, axes in list(table.items()):
                of = next((of for path, of in gone.items() if _around(path, name)), None)
                pinned = None if of is None else axes.get(str(of.folds))
                if of is None or pinned is None:
                    continue
                if not all(any(_around(path, other) for path in gone) for other in self.reach[id(pinned.by)]):
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


def _around(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def outermost(paths: Iterable[str]) -> list[str]:
    """Those that are in no other."""
    found: list[str] = []
    for path in sorted(paths, key=lambda path: path.count(".") + bool(path)):
        if not any(_around(outer, path) for outer in found):
            found.append(path)
    return found
