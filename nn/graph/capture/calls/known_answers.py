"""Known answers: what Python may ask of a tensor without values, because every value gives the same answer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KnownAnswers"]

aten = torch.ops.aten
_ASKS = (aten.is_nonzero.default, aten.item.default, aten._local_scalar_dense.default)
_DRAWS = (aten.rand.default, aten.rand_like.default)


class KnownAnswers:
    """Knows which tensors are true: results of checks, and uniform draws above 0.

    `torch.rand(1) > 0` is how a layer asks whether to leave itself out with a chance of 0, such as LoHa's adapters. One
    draw of 2 ** 24 is 0; a graph has the layer then too, because that is what the chance says.
    """

    def __init__(self, number: Callable[[Tensor], int]) -> None:
        self.number = number  # of a tensor's value: torch.rand returns another object than its op
        self._true: dict[int, Tensor] = {}  # kept alive, because they are known by their identity
        self._drawn: set[int] = set()

    def see(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Take note of a call and its result, which are recorded by now."""
        if func in _DRAWS:
            self._drawn.add(self.number(out))
        elif func is aten._is_all_true.default or (
            func is aten.gt.Scalar and args[1] <= 0 and out.numel() == 1 and self.number(args[0]) in self._drawn
        ):
            self._true[id(out)] = out

    def is_true(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether this call asks for a value that is True in every run."""
        return func in _ASKS and id(args[0]) in self._true
