"""Modules with global parameters; they stay ordinary modules."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from ..placement import Placement
from ..placement.errors import SbpError
from ..sbp import B, SbpLike, signature
from .factories import tensor
from .tensor import GlobalTensor

__all__ = ["to_global"]

Signatures: TypeAlias = "SbpLike | Mapping[str, SbpLike] | Callable[[str, torch.Tensor], SbpLike]"


def to_global(module: nn.Module, placement: Placement, sbp: Signatures = B) -> nn.Module:
    """Make a module's parameters and buffers global, in place, and return it.

    `sbp` is one signature for all, a dict from patterns of names to signatures (the first that fits counts, what fits
    none is B), or a function of name and tensor. Every process passes the same values; nothing is sent.
    """
    said = _reader(sbp, placement)
    made: dict[int, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if id(value) not in made:
                    full = f"{prefix}.{name}" if prefix else name
                    made[id(value)] = _global(full, value, placement, said(full, value))
                held[name] = made[id(value)]
    _unused(sbp, module)
    return module


def _global(name: str, value: torch.Tensor, placement: Placement, sbp: SbpLike) -> torch.Tensor:
    if isinstance(value, GlobalTensor):
        moved = value.detach().to_global(placement=placement, sbp=sbp)
    else:
        moved = tensor(value.detach(), placement=placement, sbp=sbp)
    moved._made = name
    if isinstance(value, nn.Parameter):
        moved._is_param = True
        moved.requires_grad_(value.requires_grad)
    return moved


def _reader(sbp: Any, placement: Placement) -> Callable[[str, torch.Tensor], SbpLike]:
    if callable(sbp):
        return sbp  # type: ignore[no-any-return]
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        patterns = dict(sbp)

        def look(name: str, value: torch.Tensor) -> SbpLike:
            return next((entry for pattern, entry in patterns.items() if fnmatchcase(name, pattern)), B)

        return look
    signature(sbp, placement)
    return lambda name, value: sbp


def _by_axis(sbp: Mapping[str, Any], placement: Placement) -> bool:
    """Whether a dict names axes of the placement, as signatures may be written too."""
    return bool(sbp) and set(sbp) <= set(placement.names or ())


def _unused(sbp: Any, module: nn.Module) -> None:
    if not isinstance(sbp, Mapping):
        return
    parameters = module.named_parameters(remove_duplicate=False)  # a tied weight goes by all its names
    names = [name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))]
    for pattern in sbp:
        if not any(fnmatchcase(name, pattern) for name in names) and not _is_axis(pattern, module):
            raise SbpError(
                f"to_global: no parameter or buffer is called {pattern!r}\n"
                f"  there are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
            )


def _is_axis(pattern: str, module: nn.Module) -> bool:
    values = [*module.parameters(), *module.buffers()]
    return any(isinstance(v, GlobalTensor) and pattern in (v.placement.names or ()) for v in values)
