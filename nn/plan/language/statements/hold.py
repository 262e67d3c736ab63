"""The statement `hold`: modules whose flows follow from the lines, and are not chosen."""

from dataclasses import dataclass
from typing import Self

from ..statement import Assigning, LineForm, Statement, outermost
from ..terms import Columns, Token, path_of

__all__ = ["Hold"]


@dataclass(frozen=True)
class Hold(Statement):
    """Modules in which flows that no line names follow from those that are named, whatever another way would cost."""

    path: str

    form = LineForm(
        heads=("hold",),
        grammar="hold: _HOLD PATH",
        examples={"hold **": ("**",), "hold model.layers.*": ("model.layers.*",)},
        says="flows that no line names follow from the lines, and are not chosen ([holding a plan](#holding-a-plan))",
    )

    @classmethod
    def read(cls, at: Columns, path: Token) -> Self:
        return cls(path_of(path, at))

    def __str__(self) -> str:
        return f"hold {self.path}"

    def assign(self, to: Assigning) -> None:
        paths = outermost([*to.made.options.get("hold", ()), *to.met_modules(self, self.path)])
        to.made.options["hold"] = tuple(paths)
