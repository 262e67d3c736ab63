"""The statement `compress`: the encoders by which moves take fewer bytes."""

from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from torch import nn

from .....boxing.encoders.named import encoder_of
from .....placement.errors import SbpError
from ....model.compress import compress
from ....model.path_syntax import TextFault
from ..axes import Grids
from ..statement import Assigning, LineForm, Statement, outermost
from ..terms import Columns, Token, axis_of, column, known_word, path_of

__all__ = ["Compress"]


@dataclass(frozen=True)
class Compress(Statement):
    """The encoder by which gradients are added up, or what hops to modules from other ranks is sent."""

    path: str
    by: str
    over: str | None = None
    what: Literal["grads", "hops"] = "grads"

    form = LineForm(
        heads=("compress",),
        grammar=r"""
compress: _COMPRESS PATH [PATH] "by"i ENCODER ["over"i NAME]
ENCODER: /[^\W\d]\w*(\s*\(.*\))?/
""",
        words={"ENCODER": "an encoder such as topk(fraction=0.01)"},
        examples={
            "compress model.layers.** by sign(rows=True) over data": ("model.layers.**", "sign(rows=True)", "data"),
            "compress ** by topk(fraction=0.1)": ("**", "topk(fraction=0.1)"),
            "compress hops h.4 by int8()": ("h.4", "int8()", None, "hops"),
        },
        says="the [encoder](evidence/systems/compression.md) by which gradients are added up; "
        "`compress hops PATH by int8()`, that of values that come to modules from other ranks",
        subject=("path", "what"),
    )

    @classmethod
    def read(cls, at: Columns, first: Token, second: Token | None, by: Token, over: Token | None) -> Self:
        path = first if second is None else second
        at["by"] = column(by)
        what = "grads" if second is None else known_word(first, first.lower(), ("grads", "hops"), "kind of move")
        try:
            encoder = str(encoder_of(by))
        except SbpError as error:
            message, _, fix = str(error).partition("\n")
            raise TextFault(column(by), message, fix.strip()) from None
        axis = None if over is None else axis_of(over, at, "over")
        return cls(path_of(path, at), encoder, axis, cast(Any, what))

    def __str__(self) -> str:
        hops = "hops " if self.what == "hops" else ""
        return f"compress {hops}{self.path} by {self.by}" + (f" over {self.over}" if self.over else "")

    def assign(self, to: Assigning) -> None:
        modules, parameters = to.met(self, self.path)
        to.mark(self, modules if self.what == "hops" else outermost(modules) + parameters)
        if self.over is not None:
            to.known(self, self.over)

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        encoders = dict.fromkeys([name or "*" for name in names], encoder_of(self.by))
        compress(model, encoders, over=self.over, kind=self.what)
