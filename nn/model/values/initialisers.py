"""Initialisers: the methods that give a module its values, and whether they did.

A module is filled by `_init_weights` of the nearest module around it that has one, as Hugging Face's models are, then
by its own `reset_parameters`, as torch's layers are. Memory is filled with NaN first, so that what stays empty shows.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Initialisers", "blank", "initialisers", "ours", "written"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # NaN stands for what was not written


@dataclass(frozen=True, slots=True)
class Initialisers:
    """The initialisers of a module, in the order they are tried; `any` also counts those around it, which may fill
    it."""

    own: tuple[Callable[[], object], ...]
    any: bool


def initialisers(model: nn.Module) -> dict[nn.Module, Initialisers]:
    """Those of every module in a model."""
    found: dict[nn.Module, Initialisers] = {}

    def visit(module: nn.Module, outer: Callable[[nn.Module], object] | None, around: bool) -> None:
        if module in found:
            return
        given = getattr(module, "_init_weights", None)
        weights = given if given is not None and _needs(given, 1) else outer
        own: list[Callable[[], object]] = [] if weights is None else [partial(weights, module)]
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None and _needs(reset, 0):
            own.append(reset)
        found[module] = Initialisers(tuple(own), bool(own) or around)
        for child in module.children():
            visit(child, weights, bool(own) or around)

    visit(model, None, False)
    return found


def _needs(function: Any, arguments: int) -> bool:
    """Whether a function is called with so many arguments."""
    if not callable(function):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in kinds]
    return len(needed) == arguments


def blank(like: Tensor, on: torch.device) -> Tensor:
    """Memory for a whole tensor or parameter, known not to be filled yet."""
    whole = torch.empty_like(like, device=on, requires_grad=False)
    if whole.dtype in FLOATS:
        whole.fill_(torch.nan)
    if isinstance(like, nn.Parameter):
        whole = nn.Parameter(whole, like.requires_grad)
    whole._sbpflow_version = whole._version  # type: ignore[attr-defined]
    return whole


def ours(value: Tensor) -> bool:
    """Whether it was made by `blank`, and not by an initialiser that put another in its place."""
    return hasattr(value, "_sbpflow_version")


def written(value: Tensor) -> bool:
    """Whether all of it was filled. The sum comes first: it needs no memory, and is a number if all are."""
    if not value.numel():
        return True
    if value.dtype in FLOATS:
        return not (value.sum().isnan() and value.isnan().any())
    return value._version > getattr(value, "_sbpflow_version", -1)
