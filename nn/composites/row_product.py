"""The product of rows and a weight, however it was called: `linear`, `matmul`, `mm` or `addmm`."""

from typing import Any, NamedTuple

import torch

from ..model.inside import Left
from .axis import Axis, AxisValue

__all__ = ["PRODUCTS", "RowProduct"]

aten = torch.ops.aten
PRODUCTS = ("linear", "matmul", "mm", "addmm")
NOTED = "note modules that multiply rows by a weight, such as nn.Linear"


class RowProduct(NamedTuple):
    """Rows, the weight, the bias, and the dim of the weight that comes out."""

    x: AxisValue
    weight: AxisValue
    bias: AxisValue | None
    out: int

    @classmethod
    def of(cls, axis: Axis, args: tuple[AxisValue, ...], kwargs: dict[str, Any]) -> "RowProduct | Left":
        """The product that a call is; another call is left as it is."""
        name = axis.name
        if kwargs:
            return axis.leave(f"{name} scales its terms", "write it as a product, and scale what it gives")
        bias, (x, weight) = (args[0], args[1:]) if name == "addmm" else (args[2] if len(args) > 2 else None, args[:2])
        if x.ndim < 2 or weight.ndim != 2 or (bias is not None and bias.ndim != 1):
            return axis.leave(f"{name} of {x.shape} and {weight.shape} is not one of rows and a weight", NOTED)
        return cls(x, weight, bias, 0 if name == "linear" else 1)

    @property
    def op(self) -> Any:
        """The op that multiplies parts of the two."""
        return aten.linear.default if self.out == 0 else aten.matmul.default
