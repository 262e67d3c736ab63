"""The statement `take`: the plan that a model of transformers brings along."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .....placement.errors import SbpError
from ...taken import KINDS, taken
from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, axis_of, column, known_word

__all__ = ["TakePlan"]


@dataclass(frozen=True)
class TakePlan(Statement):
    """The plan that the model's own config has, `tp_plan`, `ep_plan` or `pp_plan`, over an axis."""

    what: str
    over: str

    form = LineForm(
        heads=("take",),
        grammar='take: _TAKE WORD "over"i NAME',
        words={"WORD": "tp_plan, ep_plan or pp_plan"},
        examples={
            "take tp_plan over tensor": ("tp_plan", "tensor"),
            "take ep_plan over expert": ("ep_plan", "expert"),
        },
        says="the plan that a transformers config has: `tp_plan`, `ep_plan`, `pp_plan`",
        subject=("what",),
    )

    @classmethod
    def read(cls, at: Columns, what: Token, over: Token) -> Self:
        at["what"] = column(what)
        known = known_word(what, what.lower(), KINDS, "plan of a config")
        return cls(known, axis_of(over, at, "over"))

    def __str__(self) -> str:
        return f"take {self.what} over {self.over}"

    def stands_for(self, to: Assigning) -> Sequence[str]:
        to.known(self, self.over)
        try:
            return taken(to.model, self.over, self.what)
        except SbpError as error:
            raise LineFault(self, "what", str(error)) from None
