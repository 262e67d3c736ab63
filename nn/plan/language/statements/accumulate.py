"""Statements on a batch in parts: `N micro-batches`, whose gradients add up, and `draw by micro-batch`."""

from dataclasses import dataclass
from typing import Self

from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, column, whole
from .pipe import Pipe

__all__ = ["Accumulate", "DrawBy"]


@dataclass(frozen=True)
class Accumulate(Statement):
    """A batch in so many micro-batches, one behind the other: less memory, and gradients that meet once a step."""

    micro_batches: int

    form = LineForm(
        heads=("16",),
        grammar=r"""
accumulate: COUNT MICRO_BATCHES
COUNT.2: /\d+(?=\s*micro[-_ ]?batch)/i
""",
        words={"COUNT": "a number of micro-batches"},
        examples={"16 micro-batches": (16,), "1 micro-batches": (1,)},
        says="the batch in parts whose gradients add up ([accumulation](#gradient-accumulation))",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, many: Token, _: Token) -> Self:
        at["micro_batches"] = column(many)
        return cls(whole(many, 1))

    def __str__(self) -> str:
        return f"{self.micro_batches} micro-batches"

    def assign(self, to: Assigning) -> None:
        for by in (piped.by for piped in to.made.pipes):
            if isinstance(by, Pipe) and by.micro_batches is not None:
                raise LineFault(self, "micro_batches", "the pipeline says how many micro-batches already", other=by)
        to.made.options["micro_batches"] = self.micro_batches


@dataclass(frozen=True)
class DrawBy(Statement):
    """Random numbers that each micro-batch draws for itself, or pieces of the batch's, which are held until the step
    ends and are those of one device."""

    each: bool

    form = LineForm(
        heads=("draw",),
        grammar=r"""
draw: _DRAW "by"i SCOPE
SCOPE.2: /(micro[-_ ]?)?batch\b/i
""",
        words={"SCOPE": "micro-batch or batch"},
        examples={"draw by micro-batch": (True,), "draw by batch": (False,)},
        says="random numbers of each micro-batch by itself, or the batch's in pieces ([dropout](#dropout-in-parts))",
        subject=(),
    )

    @classmethod
    def read(cls, at: Columns, scope: Token) -> Self:
        at["draws"] = column(scope)
        return cls(str(scope).lower().startswith("micro"))

    def __str__(self) -> str:
        return f"draw by {'micro-batch' if self.each else 'batch'}"

    def assign(self, to: Assigning) -> None:
        to.made.options["draws"] = "micro_batch" if self.each else "batch"
        to.made.saying["draws"] = self
