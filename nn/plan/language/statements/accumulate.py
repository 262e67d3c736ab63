"""The statement `N micro-batches`: a batch that is run in parts whose gradients add up."""

from dataclasses import dataclass
from typing import Self

from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, column, whole
from .pipe import Pipe

__all__ = ["Accumulate"]


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
