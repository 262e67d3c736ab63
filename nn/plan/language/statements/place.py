"""The statement `place`: modules at one place of an axis."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from ....model.annotate import place
from ..axes import Grids
from ..statement import Assigning, LineFault, LineForm, Statement
from ..terms import Columns, Token, axis_of, column, path_of, whole

__all__ = ["Place"]


@dataclass(frozen=True)
class Place(Statement):
    """Modules at one place of an axis."""

    path: str
    axis: str
    at: int

    form = LineForm(
        heads=("place",),
        grammar='place: _PLACE PATH "at"i NAME "=" INT',
        examples={"place model.vision at pipe=0": ("model.vision", "pipe", 0)},
        says="modules at one place of an axis",
    )

    @classmethod
    def read(cls, at: Columns, path: Token, axis: Token, place: Token) -> Self:
        at["at"] = column(place)
        return cls(path_of(path, at), axis_of(axis, at), whole(place))

    def __str__(self) -> str:
        return f"place {self.path} at {self.axis}={self.at}"

    def assign(self, to: Assigning) -> None:
        to.known(self, self.axis)
        size = to.grids.size(self.axis)
        if not 0 <= self.at < size or self.axis in to.grids.folds:
            raise LineFault(self, "at", f"{self.axis}={self.at}: the axis has places 0 to {size - 1}")
        for path in to.met_modules(self, self.path):
            to.made.places[path] = self, self.axis

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        place([model.get_submodule(name) for name in names], grids.whole.at(**{self.axis: self.at}))
