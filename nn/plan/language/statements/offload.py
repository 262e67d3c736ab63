"""The statement `offload`: values that lie on the host or the disk until they are needed."""

from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from torch import nn

from ....model.offload import offload
from ....model.path_syntax import TextFault
from ..axes import Grids
from ..statement import Assigning, LineForm, Statement, outermost
from ..terms import Columns, Kind, Token, column, kinds_of, known_word, path_of, whole

__all__ = ["Offload"]


@dataclass(frozen=True)
class Offload(Statement):
    """Values that lie on the host or the disk until they are needed, which are brought so many layers ahead."""

    path: str
    what: Kind | Literal["saved"] = "states"
    to: Literal["cpu", "disk"] = "cpu"
    ahead: int | None = None

    form = LineForm(
        heads=("offload",),
        grammar='offload: _OFFLOAD PATH [PATH] _TO WORD ["ahead"i INT]',
        words={"WORD": "cpu or disk"},
        examples={
            "offload states ** to cpu ahead 2": ("**", "states", "cpu", 2),
            "offload states ** to cpu": ("**",),
            "offload saved h.[8:] to disk ahead 2": ("h.[8:]", "saved", "disk", 2),
        },
        says="states of optimizers, or saved activations (`offload saved PATH to cpu`), on the host or the `disk`",
        subject=("path", "what"),
    )

    @classmethod
    def read(cls, at: Columns, first: Token, second: Token | None, to: Token, ahead: Token | None) -> Self:
        path = first if second is None else second
        at["to"] = column(to)
        what = kinds_of(first, at, ("saved",)) if second is not None else ("states",)
        if len(what) > 1:
            raise TextFault(column(first), "several kinds of values are offloaded", "give each a line of its own")
        where = known_word(to, to.lower(), ("cpu", "disk"), "place to offload to")
        if ahead is not None:
            at["ahead"] = column(ahead)
        return cls(path_of(path, at), cast(Any, what[0]), cast(Any, where), None if ahead is None else whole(ahead))

    def __str__(self) -> str:
        ahead = f" ahead {self.ahead}" if self.ahead is not None else ""
        return f"offload {self.what} {self.path} to {self.to}{ahead}"

    def assign(self, to: Assigning) -> None:
        modules, parameters = to.met(self, self.path)
        saves = self.what == "saved" and modules  # as modules do, and no parameter
        to.mark(self, outermost(modules) + ([] if saves else parameters))

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        ahead = self.ahead if self.what == "saved" else None  # states stay where they are: nothing is brought back
        offload(model, [name or "*" for name in names], what=self.what, to=self.to, ahead=ahead)
