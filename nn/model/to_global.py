"""Modules with global parameters; they stay ordinary modules."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...boxing.box import dense
from ...placement import Placement
from ...placement.errors import SbpError, SbpflowError
from ...sbp import B, SbpLike, signature
from ...sbp.signature import Broadcast, Partial, Split
from ...sbp.text import on_all_axes
from ..tensors.agreement import checksum, told
from ..tensors.factories import check_values, cut
from ..tensors.tensor import GlobalTensor
from .annotate import spared
from .replacement import check_replaceable, replace

__all__ = ["to_global"]

M = TypeVar("M", bound=nn.Module)
Signatures: TypeAlias = "SbpLike | Mapping[str, SbpLike] | Callable[[str, torch.Tensor], SbpLike]"


def to_global(module: M, placement: Placement, sbp: Signatures = B) -> M:
    """Make a module's parameters and buffers global, in place, and return it.

    `sbp` is one signature for all, a dict from patterns of names to signatures (the first that fits counts, what fits
    none is B), or a function of name and tensor. One entry (`S(0)`) is meant for every axis; what is said of many
    tensors leaves those without dims B instead of split. Every process passes the same values. They are not sent;
    ranks only compare a checksum, since a model that each rank made from another seed would train without a word.
    Hooks, gradients and attributes of a parameter come along, and handles of hooks still remove them.
    """
    said = _reader(sbp, placement)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        check_replaceable(name, value, "to_global")
        if not isinstance(value, GlobalTensor):
            check_values(value, f"to_global of {name}")
    _same_values(module, placement)
    made: dict[int, torch.Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is None:
                    continue
                if id(value) not in made:
                    full = f"{prefix}.{name}" if prefix else name
                    made[id(value)] = _global(full, value, placement, said(full, value))
                    vars(made[id(value)])["_path"] = full
                    _stale[value] = full, "to_global", "make the optimizer after flow.nn.to_global(module, ...)"
                held[name] = made[id(value)]
    _unused(sbp, module, placement)
    return module


def _same_values(module: nn.Module, placement: Placement, asked: str = "to_global") -> None:
    """Refuse plain values that differ between ranks."""
    values = dict((*module.named_parameters(), *module.named_buffers()))
    values |= {f"{name}.grad": dense(v.grad) for name, v in values.items() if v.grad is not None}
    plain = {name: v for name, v in values.items() if not isinstance(v, GlobalTensor) and not v.is_meta}
    rows = (told([checksum(value) for value in plain.values()], placement, "same values") if plain else None) or []
    for rank, row in zip(placement.flat, rows, strict=False):
        other = next((name for name, mine, first in zip(plain, row, rows[0], strict=True) if mine != first), None)
        if other is not None:
            raise SbpError(
                f"{asked}: ranks {placement.flat[0]} and {rank} have different values in {other}\n"
                "  make the model from the same seed on every rank, as by torch.manual_seed(0) before it, "
                "or load the same weights first"
            )


# What was a module's parameter before it became global, its name, by what, and the fix: an optimizer made before still
# holds it.
_stale: Any = WeakTensorKeyDictionary()


def _look_for_stale(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before an optimizer steps: does it hold what nothing uses any more? It would never change a weight."""
    if not _stale:
        return
    for group in optimizer.param_groups:
        for value in group["params"]:
            if value.grad is None and not isinstance(value, GlobalTensor) and value in _stale:
                name, by, fix = _stale[value]
                raise SbpError(
                    f"the optimizer was made before {by}, and holds the {name} that was replaced by it\n  {fix}"
                )


register_optimizer_step_pre_hook(_look_for_stale)


def _global(name: str, value: torch.Tensor, placement: Placement, sbp: SbpLike) -> torch.Tensor:
    try:
        if isinstance(value, GlobalTensor):
            moved = value.detach().to_global(placement=placement, sbp=on_all_axes(sbp, placement))
        else:
            moved = cut(value.detach(), placement, on_all_axes(sbp, placement))  # compared before, all at once
    except SbpflowError as error:
        raise type(error)(
            f"to_global of {name} {tuple(value.shape)}: {error}\n"
            f'  give it a signature of its own, as in to_global(module, placement, {{"{name}": flow.B, ...}})'
        ) from None
    moved._made = name
    return replace(value, moved)


def _reader(sbp: Any, placement: Placement) -> Callable[[str, torch.Tensor], SbpLike]:
    if callable(sbp) and not isinstance(sbp, Split | Broadcast | Partial):
        return sbp  # type: ignore[no-any-return]
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        patterns = dict(sbp)

        def look(name: str, value: torch.Tensor) -> SbpLike:
            found = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
            if found is None:
                return B
            said: SbpLike = patterns[found] if found == name else spared(patterns[found], value)
            return said

        return look
    signature(on_all_axes(sbp, placement), placement)
    return lambda name, value: spared(sbp, value)


def _by_axis(sbp: Mapping[str, Any], placement: Placement) -> bool:
    """Whether a dict names axes of the placement, as signatures may be written too."""
    return bool(sbp) and set(sbp) <= set(placement.names or ())


def _unused(sbp: Any, module: nn.Module, placement: Placement) -> None:
    if not isinstance(sbp, Mapping):
        return
    parameters = module.named_parameters(remove_duplicate=False)  # a tied weight goes by all its names
    names = [name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))]
    for pattern in sbp:
        if not any(fnmatchcase(name, pattern) for name in names) and not _is_axis(pattern, module):
            near = get_close_matches(pattern, [*names, *(placement.names or ())], 1)
            raise SbpError(
                f"to_global: no parameter or buffer is called {pattern!r}, nor an axis of {placement!r}\n"
                f"  there are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )


def _is_axis(pattern: str, module: nn.Module) -> bool:
    values = [*module.parameters(), *module.buffers()]
    return any(isinstance(v, GlobalTensor) and pattern in (v.placement.names or ()) for v in values)
