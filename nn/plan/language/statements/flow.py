"""The statements `PATH -> signature`, `PATH <- signature` and `input`: how values flow through a step."""

from dataclasses import dataclass
from typing import Literal, Self

from .....sbp import B, P, S
from ..axes import AxisEntries, signature_text
from ..statement import Assigning, LineForm, Statement
from ..terms import Columns, Signature, Token, column, path_of

__all__ = ["Flow", "Input"]


@dataclass(frozen=True)
class Flow(Statement):
    """The signature in which the result of a module flows, or its input."""

    path: str
    entries: AxisEntries
    of: Literal["result", "input"] = "result"

    form = LineForm(
        heads=("->", "<-"),
        grammar="flow: PATH (INTO | OUT) signature",
        examples={
            "model.norm -> tensor=S(1)": ("model.norm", (("tensor", S(1)),)),
            "model.layers.*.mlp <- tensor=B": ("model.layers.*.mlp", (("tensor", B),), "input"),
            'head -> tensor=P, data=P("max")': ("head", (("tensor", P), ("data", P("max")))),
            "head <- ?": ("head", None, "input"),
        },
        says="how the result of a module flows, or its input",
        subject=("path", "of"),
    )

    @classmethod
    def read(cls, at: Columns, path: Token, arrow: Token, signature: Signature) -> Self:
        at["arrow"] = column(arrow)
        at.update(signature[1])
        return cls(path_of(path, at), signature[0], "result" if arrow == "->" else "input")

    def __str__(self) -> str:
        return f"{self.path} {'->' if self.of == 'result' else '<-'} {signature_text(self.entries)}"

    def assign(self, to: Assigning) -> None:
        for path in to.met_flowing(self, self.path):
            to.pin(to.made.flows.setdefault((path, self.of), {}), self, self.entries)
            to.fold(path, self.entries)


@dataclass(frozen=True)
class Input(Statement):
    """The signature of an argument of the step, by its name or path."""

    name: str
    entries: AxisEntries

    form = LineForm(
        heads=("input",),
        grammar="input: _INPUT PATH INTO signature",
        examples={
            "input tokens <- data=S(0)": ("tokens", (("data", S(0)),)),
            "input tokens <- data=S(0), context=S(1)": ("tokens", (("data", S(0)), ("context", S(1)))),
        },
        says="how an argument of the step lies",
        subject=("name",),
    )

    @classmethod
    def read(cls, at: Columns, path: Token, arrow: Token, signature: Signature) -> Self:
        at["arrow"] = column(arrow)
        at.update(signature[1])
        return cls(path_of(path, at), signature[0])

    def __str__(self) -> str:
        return f"input {self.name} <- {signature_text(self.entries)}"

    def assign(self, to: Assigning) -> None:
        to.pin(to.made.inputs.setdefault(self.name, {}), self, self.entries)
