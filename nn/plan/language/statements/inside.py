"""The statement `inside`: a named way to compute what modules do, or that they run eagerly."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from ....eager_parts.marks import eager
from ....model.inside import inside
from ..axes import Grids
from ..statement import Assigning, LineForm, Statement
from ..terms import Columns, Token, axis_of, column, path_of

__all__ = ["Inside"]

EAGER = "eager"


@dataclass(frozen=True)
class Inside(Statement):
    """A named way to compute what modules do; over no axis: eagerly."""

    path: str
    use: str
    over: tuple[str, ...] = ()

    form = LineForm(
        heads=("inside",),
        grammar=r"""
inside: _INSIDE PATH (_USE WAY "over"i NAME ("," NAME)* | _RUN EAGER)
_USE.2: /use(?!\S)/i
_RUN.2: /run(?!\S)/i
EAGER.2: /eager(?!\S)/i
WAY: /[^\s:,()\[\]{}=<>?]+(\s*\([^()]*\))?/
""",
        words={"WAY": "the name of a way to compute", "EAGER": "'eager'"},
        examples={
            "inside model.layers.*.self_attn use ring over context": ("model.layers.*.self_attn", "ring", ("context",)),
            "inside h.*.mlp use summa over row, col": ("h.*.mlp", "summa", ("row", "col")),
            "inside criterion run eager": ("criterion", EAGER),
        },
        says="a named way to compute, over an axis or several, as in `use summa over row, col` "
        "([which there are](reference/composites.md)), or `run eager`, for what "
        "[cannot be captured](reference/captured.md#eager-parts)",
    )

    @classmethod
    def read(cls, at: Columns, path: Token, use: Token, *over: Token) -> Self:
        at["use"] = column(use)
        if not over:
            return cls(path_of(path, at), EAGER)
        return cls(path_of(path, at), str(use), tuple(axis_of(axis, at, "over") for axis in over))

    def __str__(self) -> str:
        if not self.over:
            return f"inside {self.path} run {EAGER}"
        return f"inside {self.path} use {self.use} over {', '.join(self.over)}"

    def assign(self, to: Assigning) -> None:
        to.mark(self, to.met_modules(self, self.path) if self.over else to.met_flowing(self, self.path))
        to.known(self, *self.over)

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        modules = [model.get_submodule(name) for name in names]
        if self.over:
            inside(modules, use=self.use, over=self.over)
        else:
            eager(modules)
