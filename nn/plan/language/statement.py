"""A statement of a plan, and the model that it is assigned to.

Each kind of statement is a frozen dataclass in a file of its own, which has all that is known of it:

    offload.py    how a line is written, read and printed; examples, and text for the docs;
                  the parts of a model that it meets, and the notes that it puts on them
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import nn

from ....placement.errors import did_you_mean
from ....sbp import Sbp
from ...model.flows import is_called
from ...model.paths import meant_path, met
from .axes import AxisEntries, Grids
from .terms import Columns, Kind

__all__ = [
    "Assigning", "Axes", "LineFault", "LineForm", "Meaning", "Pinned", "PipedLayers", "Statement", "around",
    "outermost",
]  # fmt: skip


class LineForm(NamedTuple):
    """The form of a kind of lines."""

    heads: tuple[str, ...]  # the words that they begin with, or the signs in them
    grammar: str  # lark's: the first rule is the line, others give tuples; plan.lark has what several share
    examples: Mapping[str, tuple[object, ...]]  # lines, and the fields of their values; the first are of the heads
    says: str  # a cell of the table in docs/plans.md
    words: Mapping[str, str] = {}  # how a terminal is called where it is missing
    subject: tuple[str, ...] = ("path",)  # fields: two lines in which they are equal are one line, changed


class Statement:
    """A line of a plan as a value, which prints as it is written."""

    form: ClassVar[LineForm]

    @classmethod
    def read(cls, at: Columns, *parts: Any, **none: Any) -> "Statement":
        """The value of a line from the parts of its rule; where they stand is put into `at`."""
        raise NotImplementedError

    def stands_for(self, to: "Assigning") -> Sequence[str] | None:
        """The lines that this one stands for, if it says nothing itself."""
        return None

    def assign(self, to: "Assigning") -> None:
        """Say what this means for a model; raises a `LineFault`."""

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        """Note it on the modules and parameters for which it counts."""


class LineFault(Exception):
    """A line that a model cannot follow, at one of its parts, or two that cannot both be; shown with the plan."""

    def __init__(self, line: Statement, part: str, message: str, other: Statement | None = None) -> None:
        super().__init__(message)
        self.line, self.part, self.message, self.other = line, part, message, other


class Pinned(NamedTuple):
    """An entry that is said along one axis, and by which line; None leaves it to the planner."""

    entry: Sbp | None
    by: Statement


Axes: TypeAlias = dict[str, Pinned]


class PipedLayers(NamedTuple):
    """Layers of one line as stages at places of an axis, in so many chunks on each; 0: as the schedule usually has."""

    by: Statement
    axis: str
    places: range
    layers: tuple[str, ...]
    schedule: str
    chunks: int


@dataclass
class Meaning:
    """The lines of a plan for one model: by names of parameters and paths of modules, in the order of the lines."""

    grids: Grids
    parameters: tuple[str, ...] = ()
    rests: dict[Kind, dict[str, Axes]] = field(default_factory=lambda: {"weights": {}, "grads": {}, "states": {}})
    free: dict[str, Statement] = field(default_factory=dict)  # parameters that are the planner's along all axes
    flows: dict[tuple[str, str], Axes] = field(default_factory=dict)  # by module, and "result" or "input"
    inputs: dict[str, Axes] = field(default_factory=dict)
    folded: dict[str, str] = field(default_factory=dict)  # modules that see an axis as another
    places: dict[str, tuple[Statement, str]] = field(default_factory=dict)  # with the axis at whose place they are
    pipes: list[PipedLayers] = field(default_factory=list)  # of one schedule, in the order in which they run
    marks: list[tuple[Statement, list[str]]] = field(default_factory=list)  # with the names for which they count
    options: dict[str, Any] = field(default_factory=dict)  # of the whole step
    saying: dict[str, Statement] = field(default_factory=dict)  # the lines of options that others may not go with


class Assigning:
    """The model that a plan's lines are assigned to: which of its parts they meet, and what they come to."""

    def __init__(self, model: nn.Module, made: Meaning, stepped: Callable[[], Mapping[int, str]]) -> None:
        self.model, self.made, self.grids = model, made, made.grids
        self.stepped = stepped  # the optimizers that have trained parameters, by the ids of these
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tied: dict[int, list[str]] = defaultdict(list)
        for name, value in self.parameters.items():
            self._tied[id(value)].append(name)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.reach: dict[int, list[str]] = {}  # by the id of a line, the parameters that it meets
        made.parameters = tuple(self.parameters)

    def met(self, line: Statement, path: str) -> tuple[list[str], list[str]]:
        """The modules and the parameters that a pattern meets; there has to be one."""
        modules, parameters = met(path, self.modules), met(path, self.parameters, self.modules)
        if not modules and not parameters:
            raise self._nothing(line, path, [*self.parameters, *filter(None, self.modules)])
        return modules, parameters

    def met_modules(self, line: Statement, path: str) -> list[str]:
        modules = met(path, self.modules)
        if not modules:
            raise self._nothing(line, path, filter(None, self.modules))
        return modules

    def met_flowing(self, line: Statement, path: str) -> list[str]:
        """Modules that are called, where a pattern also meets the lists that hold them."""
        modules = self.met_modules(line, path)
        return [name for name in modules if is_called(self.modules[name])] or modules

    def met_parameters(self, line: Statement, path: str) -> tuple[list[str], bool]:
        """The parameters that are named, and those of modules that are; and whether the line is meant for many."""
        modules, named = self.met(line, path)
        inside = {f"{path}." if path else "" for path in modules}
        names = [n for n in self.parameters if n in {*named} or any(n.startswith(head) for head in inside)]
        if not names:
            raise LineFault(line, "path", f"{path} has no parameters\n  name a module that has some")
        return names, len(names) > 1 or bool(modules)

    def names_of(self, name: str) -> Sequence[str]:
        """All names of a parameter: what is said of one of tied ones counts for the tensor."""
        return self._tied[id(self.parameters[name])]

    def _nothing(self, line: Statement, path: str, names: Iterable[str]) -> LineFault:
        kind = type(self.model).__name__
        return LineFault(line, "path", f"{kind} has nothing called {path}\n  {meant_path(path, names)}")

    def known(self, line: Statement, *axes: str) -> None:
        """Refuse an axis that the grid has not."""
        for axis in axes:
            if axis not in self.grids.axes:
                fix = did_you_mean(axis, self.grids.axes, f"its axes are {', '.join(self.grids.axes)}")
                raise LineFault(line, f"axis:{axis}", f"the grid has no axis {axis}\n  {fix}")

    def pin(self, axes: Axes, line: Statement, entries: AxisEntries) -> None:
        for axis, entry in entries if entries is not None else [(name, None) for name in self.grids.axes]:
            self.known(line, axis)
            axes[axis] = Pinned(entry, line)

    def fold(self, path: str, entries: AxisEntries) -> None:
        """A module of which an axis is named that folds another is on those ranks as that axis sees them."""
        for axis, _ in entries or ():
            if axis in self.grids.folds:
                self.made.folded[path] = axis

    def mark(self, line: Statement, names: Iterable[str]) -> None:
        """Have a line noted on modules and parameters."""
        self.made.marks.append((line, [*names]))


def around(outer: str, path: str) -> bool:
    """Whether a path is that of a module, or of something in it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def outermost(paths: Iterable[str]) -> list[str]:
    """Those that are in no other."""
    found: list[str] = []
    for path in sorted(paths, key=lambda path: path.count(".") + bool(path)):
        if not any(around(outer, path) for outer in found):
            found.append(path)
    return found
