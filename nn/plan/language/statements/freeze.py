"""The statement `freeze`: parameters that are not trained."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from ..axes import Grids
from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, path_of

__all__ = ["Freeze"]


@dataclass(frozen=True)
class Freeze(Statement):
    """Parameters that are not trained, as if by `p.requires_grad_(False)`: they have no gradients and no states."""

    path: str

    form = LineForm(
        heads=("freeze",),
        grammar="freeze: _FREEZE PATH",
        examples={"freeze model.layers.[:8]": ("model.layers.[:8]",), "freeze **.bias": ("**.bias",)},
        says="parameters that are not trained ([frozen layers](#frozen-layers))",
    )

    @classmethod
    def read(cls, at: Columns, path: Token) -> Self:
        return cls(path_of(path, at))

    def __str__(self) -> str:
        return f"freeze {self.path}"

    def assign(self, to: Assigning) -> None:
        names, _ = to.met_parameters(self, self.path)
        stepped = to.stepped()
        for name in names:
            if by := stepped.get(id(to.parameters[name])):
                what = f"{name} is trained already: {by} has states of it"
                fix = f"give the step a new {by} of the parameters that train on, or leave {name} out of this line"
                raise LineFault(self, "path", f"{what}\n  {fix}")
        to.mark(self, names)

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        for name in names:
            model.get_parameter(name).requires_grad_(False)
