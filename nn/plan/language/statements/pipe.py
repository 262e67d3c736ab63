"""The statement `pipe`: layers as the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from .....actors.schedules.definition import FORMULAS
from .....actors.schedules.published import PUBLISHED, published
from .....placement.errors import ScheduleError
from ....model.path_syntax import TextFault
from ..statement import Assigning, LineFault, LineForm, PipedLayers, Statement, around, outermost
from ..terms import Columns, Token, axis_of, column, known_word, once, path_of, whole

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
    places: tuple[int, int | None] | None = None  # the first place of the axis, and the one behind the last

    form = LineForm(
        heads=("pipe",),
        grammar=r"""
pipe: _PIPE PATH "over"i NAME [PLACES] [schedule] ("," amount)*
PLACES: /\[\s*\d*\s*:\s*\d*\s*\]/
schedule: "by"i SCHEDULE mark*
mark: NAME "=" INT
amount: INT (MICRO_BATCHES | SLICES)
SCHEDULE: /[\w.-]+/
MICRO_BATCHES: /micro[-_ ]?batch(e?s)?/i
SLICES: /slices?/i
""",
        words={
            "NAME": "a name",
            "SCHEDULE": "a schedule",
            "MICRO_BATCHES": "'micro-batches'",
            "PLACES": "places such as [:2]",
        },
        examples={
            "pipe model.layers over pipe by 1f1b, 8 micro-batches": ("model.layers", "pipe", "1f1b", (), 8),
            "pipe h over pipe by 1f1b": ("h", "pipe"),
            "pipe h over pipe by interleaved v=3, 64 micro-batches": ("h", "pipe", "interleaved", (("v", 3),), 64),
            "pipe h over pipe by terapipe, 8 micro-batches, 4 slices": ("h", "pipe", "terapipe", (), 8, 4),
            "pipe h over pipe[:2] by 1f1b": ("h", "pipe", "1f1b", (), None, None, (0, 2)),
            "pipe h over pipe[2:] by 1f1b": ("h", "pipe", "1f1b", (), None, None, (2, None)),
        },
        says="layers as stages, by a [schedule](reference/schedules.md), with its marks as in `v=3`; "
        "`4 slices` cuts sequences; [two towers](pipelines.md#two-towers) are two lines, over the same places or "
        "others, as in `pipe[2:]`",
    )

    @classmethod
    def read(
        cls, at: Columns, path: Token, over: Token, places: Token | None, by: Any, *amounts: tuple[Token, Token]
    ) -> Self:
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
        return cls(*axis, schedule, tuple(marks), many.get("micro-batches"), slices, cls._places(at, places))

    @classmethod
    def _places(cls, at: Columns, said: Token | None) -> tuple[int, int | None] | None:
        """The places of an axis from [first:end]; None are all of them."""
        if said is None:
            return None
        at["places"] = column(said)
        first, end = (int(number) if number.strip() else None for number in said[1:-1].split(":"))
        if end is not None and end <= (first or 0):
            raise TextFault(column(said), f"{said} has no places", "the second number is the place behind the last")
        return (first or 0, end) if first or end is not None else None

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
        first, end = self.places or (0, None)
        over = self.over + (f"[{first or ''}:{'' if end is None else end}]" if self.places else "")
        by = " ".join([f"pipe {self.path} over {over} by {self.schedule}", *(f"{n}={k}" for n, k in self.marks)])
        many = f", {self.micro_batches} micro-batches" if self.micro_batches is not None else ""
        return by + many + (f", {self.slices} slices" if self.slices is not None else "")

    def assign(self, to: Assigning) -> None:
        to.known(self, self.over)
        size = to.grids.size(self.over)
        places = range(*slice(*(self.places or (0, None))).indices(size))
        if self.places is not None and (not places or (self.places[1] or 0) > size):
            raise LineFault(self, "places", f"{self.over} has places 0 to {size - 1}")
        layers = self._layers(to)
        for piped in to.made.pipes:
            self._beside(piped, layers)
        for name, said in (("micro_batches", self.micro_batches), ("slices", self.slices)):
            if said is not None and to.made.options.setdefault(name, said) != said:
                others = [piped.by for piped in to.made.pipes if getattr(piped.by, name) is not None]
                what = name.replace("_", "-")
                raise LineFault(self, what, f"another line says how many {what} already\n  leave one out", *others[:1])
        to.made.options["schedule"] = self.schedule
        chunks = dict(self.marks).get("v", 0)
        to.made.pipes.append(PipedLayers(self, self.over, places, layers, self.schedule, chunks))

    def _layers(self, to: Assigning) -> tuple[str, ...]:
        """The paths of the layers: those of a list, where it is named."""
        paths = to.met_modules(self, self.path)
        if len(paths) == 1 and isinstance(to.modules[paths[0]], nn.ModuleList | nn.Sequential):
            (around,) = paths
            paths = [f"{around}.{name}" if around else name for name in to.modules[around]._modules]
        return tuple(outermost(paths))

    def _beside(self, other: PipedLayers, layers: Sequence[str]) -> None:
        """Refuse what cannot be of one schedule with the layers of a line before."""
        if self.schedule != other.schedule:
            raise LineFault(self, "", f"one schedule is for both: write {other.schedule}", other=other.by)
        if self.over != other.axis:
            raise LineFault(
                self,
                "",
                f"each place of {other.axis} has ranks of each place of {self.over}, so that these are no stages\n"
                f"  write both over {other.axis}, or over places of it, as in {other.axis}[:1] and {other.axis}[1:]",
                other=other.by,
            )
        both = [path for path in layers if any(around(path, one) or around(one, path) for one in other.layers)]
        if both:
            raise LineFault(self, "", f"{both[0]} is among the layers of both", other=other.by)
