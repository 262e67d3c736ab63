"""Factories after another tensor, and the less common ones: `zeros_like` and its kin on any placement, windows, normal.

What is not said is as the other tensor has it: its shape, its dtype and, where it is global, how it lies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ...sbp import B, SbpLike
from ..tensors import factories
from .factories import _generator, _make, empty, full, rand, randint, randn
from .tensor import GlobalTensor

__all__ = [
    "empty_like",
    "full_like",
    "hann_window",
    "logspace",
    "normal",
    "ones_like",
    "rand_like",
    "randint_like",
    "randn_like",
    "zeros_like",
]


def _after(x: Tensor, placement: Placement | None, sbp: SbpLike | None, dtype: torch.dtype | None) -> dict[str, Any]:
    if isinstance(x, GlobalTensor):
        whole = sbp is None and x._layout.state.partial  # numbers that are made are no addends
        placement, sbp = placement or x.placement, B if whole else x.sbp if sbp is None else sbp
    if placement is None or sbp is None:
        raise SbpError("after a plain tensor a global one is made where it is told\n  give placement= and sbp=")
    return {"placement": placement, "sbp": sbp, "dtype": dtype or x.dtype}


def _like(make: Callable[..., GlobalTensor]) -> Callable[..., GlobalTensor]:
    def made(
        x: Tensor,
        *args: Any,
        placement: Placement | None = None,
        sbp: SbpLike | None = None,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> GlobalTensor:
        return make(*args, tuple(x.shape), **_after(x, placement, sbp, dtype), **more)

    made.__doc__ = f"`flow.{make.__name__}` of the shape of `x`, and as it lies where nothing else is said."
    return made


zeros_like, ones_like, empty_like = _like(factories.zeros), _like(factories.ones), _like(empty)
rand_like, randn_like, randint_like = _like(rand), _like(randn), _like(randint)


def full_like(
    x: Tensor,
    fill_value: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """`flow.full` of the shape of `x`, and as it lies where nothing else is said."""
    where = _after(x, placement, sbp, dtype)
    return full(tuple(x.shape), fill_value, requires_grad=requires_grad, **where)


def normal(
    mean: float,
    std: float,
    *size: Any,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> GlobalTensor:
    """torch.normal of two numbers on a placement: the same numbers whatever the placement and signature."""
    more = _generator(seed, generator, placement)
    return _make(torch.normal, (mean, std, factories._size(size)), placement, sbp, dtype, requires_grad, **more)


def hann_window(
    window_length: int,
    periodic: bool = True,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """torch.hann_window on a placement."""
    return _make(torch.hann_window, (window_length, periodic), placement, sbp, dtype, requires_grad)


def logspace(
    start: float,
    end: float,
    steps: int,
    base: float = 10.0,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """torch.logspace on a placement."""
    return _make(torch.logspace, (start, end, steps, base), placement, sbp, dtype, requires_grad)
