"""The statement `pipe`: layers as the stages of a pipeline."""

from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from .....actors.schedules.definition import FORMULAS
from .....actors.schedules.published import PUBLISHED, published
from .....placement.errors import ScheduleError
from ....model.balance import pipeline
from ....model.path_syntax import TextFault
from ..axes import Grids
from ..terms import Columns, Token, axis_of, column, known_word, once, path_of, whole
from .statement import Assigning, LineFault, LineForm, Statement, outermost

__all__ = ["Pipe"]


@dataclass(frozen=True)
class Pipe(Statement):
    """Layers as stages over an axis, by a schedule with marks such as v=3."""

    path: str
    over: str
    schedule: str = "1f1b"
    marks: tuple[tuple[str, int], ...] = ()
    micro_batches: int | None = None
    slices: int | None = None

    form = LineForm(
        heads=("pipe",),
        grammar=r"""
pipe: _PIPE PATH "over"i NAME [schedule] ("," amount)*
schedule: "by"i SCHEDULE mark*
mark: NAME "=" INT
amount: INT (MICRO_BATCHES | SLICES)
SCHEDULE: /[\w.-]+/
MICRO_BATCHES: /micro[-_ ]?batch(e?s)?/i
SLICES: /slices?/i
""",
        words={"NAME": "a name", "SCHEDULE": "a schedule", "MICRO_BATCHES": "'micro-batches'"},
        examples={
            "pipe model.layers over pipe by 1f1b, 8 micro-batches": ("model.layers", "pipe", "1f1b", (), 8),
            "pipe h over pipe by 1f1b": ("h", "pipe"),
            "pipe h over pipe by interleaved v=3, 64 micro-batches": ("h", "pipe", "interleaved", (("v", 3),), 64),
            "pipe h over pipe by terapipe, 8 micro-batches, 4 slices": ("h", "pipe", "terapipe", (), 8, 4),
        },
        says="layers as stages, by a [schedule](schedules.md), with its marks as in `v=3`; `4 slices` cuts sequences",
    )

    @classmethod
    def read(cls, at: Columns, path: Token, over: Token, by: Any, *amounts: tuple[Token, Token]) -> Self:
        many = dict[str, int]()
        for value, unit in amounts:
            name = "micro-batches" if unit.type == "MICRO_BATCHES" else "slices"
            if name in many:
                raise TextFault(column(value), f"{name} stand twice", "leave one out")
            many[name], at[name] = whole(value, 1), column(value)
        slices = many.get("slices")
        schedule, said = "1f1b" if slices is None else "terapipe", ()
        if by is not None:
            name, *said = by
            schedule = cls._scheduled(at, name, slices)
        marks = list[tuple[str, int]]()
        for name, value in said:
            known_word(name, str(name), ("v", *FORMULAS), "mark of a schedule that is a number")
            once(at, f"mark:{name}", name, f"the mark {name}")
            marks.append((str(name), whole(value, int(name == "v"))))
        axis = path_of(path, at), axis_of(over, at, "over")
        return cls(*axis, schedule, tuple(marks), many.get("micro-batches"), slices)

    @classmethod
    def _scheduled(cls, at: Columns, by: Token, slices: int | None) -> str:
        """The name of a schedule; it has to cut sequences where slices are said, and only there."""
        schedule, at["schedule"] = by.lower(), column(by)
        try:
            cuts = published(schedule).slices
        except ScheduleError:
            cuts = known_word(by, schedule, PUBLISHED, "schedule") == ""
        if cuts != (slices is not None):
            what = "cuts sequences into slices" if cuts else "does not cut sequences into slices"
            fix = f"say how many, as in {schedule}, 8 micro-batches, 4 slices" if cuts else "terapipe does"
            raise TextFault(column(by), f"{schedule} {what}", fix)
        return schedule

    def __str__(self) -> str:
        by = " ".join([f"pipe {self.path} over {self.over} by {self.schedule}", *(f"{n}={k}" for n, k in self.marks)])
        many = f", {self.micro_batches} micro-batches" if self.micro_batches is not None else ""
        return by + many + (f", {self.slices} slices" if self.slices is not None else "")

    def assign(self, to: Assigning) -> None:
        to.known(self, self.over)
        if to.made.pipe is not None:
            raise LineFault(to.made.pipe[0], "", "a plan has one pipeline", other=self)
        paths = to.met_modules(self, self.path)
        if len(paths) == 1 and isinstance(to.modules[paths[0]], nn.ModuleList | nn.Sequential):
            (around,) = paths
            paths = [f"{around}.{name}" if around else name for name in to.modules[around]._modules]
        to.made.pipe, to.made.layers = (self, self.over), tuple(outermost(paths))
        to.made.options["schedule"] = self.schedule
        if self.micro_batches is not None:
            if "micro_batches" in to.made.options:
                raise LineFault(self, "micro-batches", "another line says how many micro-batches already")
            to.made.options["micro_batches"] = self.micro_batches
        if self.slices is not None:
            to.made.options["slices"] = self.slices

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        stages = [grids.whole.at(**{self.over: at}) for at in range(grids.size(self.over))]
        layers = [model.get_submodule(name) for name in names]
        pipeline(layers, stages, self.schedule, chunks=dict(self.marks).get("v", 0), worth=1.0)
