"""The statement `cast`: the types in which values are."""

from dataclasses import dataclass
from typing import Self

from torch import nn

from ....model.cast import cast
from ..axes import Grids
from ..statement import Assigning, LineForm, Statement, outermost
from ..terms import Columns, Kinds, Token, column, kinds_of, kinds_text, known_word, path_of

__all__ = ["Cast"]

# The spelling of a type, and its other spellings.
TYPES = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "fp32": ("float32", "float", "f32"),
    "fp64": ("float64", "double", "f64"),
    "fp8": ("fp8_e4m3", "float8", "float8_e4m3fn"),
    "fp8_rowwise": ("float8_rowwise",),
}


@dataclass(frozen=True)
class Cast(Statement):
    """The type in which weights, gradients or optimizer states are."""

    path: str
    type: str
    kinds: Kinds = ("weights",)

    form = LineForm(
        heads=("cast",),
        grammar=r"""
cast: _CAST PATH [PATH] _TO TYPE
TYPE: /[\w.]+/
""",
        words={"TYPE": "a type"},
        examples={
            "cast {grads,states} ** to fp32": ("**", "fp32", ("grads", "states")),
            "cast ** to bf16": ("**", "bf16"),
            "cast head to fp8_rowwise": ("head", "fp8_rowwise"),
        },
        says="types: bf16, fp16, fp32, fp64; of products with weights fp8, fp8_rowwise",
        subject=("path", "kinds"),
    )

    @classmethod
    def read(cls, at: Columns, first: Token, second: Token | None, type: Token) -> Self:
        path = first if second is None else second
        at["type"] = column(type)
        kinds = kinds_of(None if second is None else first, at)
        names = {also: name for name, others in TYPES.items() for also in (name, *others)}
        known = names[known_word(type, type.lower().removeprefix("torch."), names, "type")]
        return cls(path_of(path, at), known, kinds)

    def __str__(self) -> str:
        return f"cast {kinds_text(self.kinds)}{self.path} to {self.type}"

    def assign(self, to: Assigning) -> None:
        modules, parameters = to.met(self, self.path)
        to.mark(self, outermost([*modules, *parameters]))  # what is in a named module is cast with it

    def note(self, model: nn.Module, names: list[str], grids: Grids) -> None:
        for kind in self.kinds:
            cast(model, dict.fromkeys([name or "*" for name in names], self.type), kind=kind)
