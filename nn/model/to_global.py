"""Modules with global parameters; they stay ordinary modules."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from ...placement import Placement
from ...placement.errors import SbpError, did_you_mean
from ...sbp import B, Layout, SbpLike, signature
from ...sbp.signature import Broadcast, Partial, Split
from ...sbp.text import on_all_axes
from ..tensors.factories import check_values, cut
from ..tensors.tensor import GlobalTensor
from .annotate import spared
from .paths import PathPattern, met
from .replacement import check_replaceable, replace
from .slots import TensorSlot, put, slots, tied
from .values.materialise import make_global
from .values.noted_values import waiting_values
from .values.same_values import check_same

__all__ = ["to_global"]

M = TypeVar("M", bound=nn.Module)
Signatures: TypeAlias = "SbpLike | Mapping[str, SbpLike] | Callable[[str, torch.Tensor], SbpLike]"


def to_global(module: M, placement: Placement, sbp: Signatures = B) -> M:
    """Make a module's parameters and buffers global, in place, and return it.

    `sbp` is one signature for all, a dict from patterns of names, as of `shard`, to signatures (the first that fits
    counts, what fits none is B), or a function of name and tensor. One entry (`S(0)`) is meant for every axis; what is
    said of many tensors leaves those without dims B instead of split. Every process passes the same values. They are
    not sent; ranks only compare a checksum, since a model that each rank made from another seed would train without a
    word. Hooks, gradients and attributes of a parameter come along, and handles of hooks still remove them. What is
    refused is so before anything changes.
    """
    held = list(slots({"": module}))
    said = _reader(sbp, module, [slot.full for slot in held], placement)
    groups = list(tied(held).values())
    files = waiting_values(tied(slot for slot in held if not isinstance(slot.value, GlobalTensor)))
    for first, *_ in groups:
        check_replaceable(first.full, first.value, "to_global")
        comes = first.value.is_meta and (id(first.value) in files or (bool(files) and first.kind == "buffer"))
        if not (isinstance(first.value, GlobalTensor) or comes):
            check_values(first.value, f"to_global of {first.full}")
    lies = [_lie(first, said(first.full, first.value), placement) for first, *_ in groups]
    fix = "make the optimizer after flow.nn.to_global(module, ...)"
    if files:
        by_id = {id(first.value): of for (first, *_), of in zip(groups, lies, strict=True)}
        make_global({"": module}, by_id, torch.device(placement.type), "to_global", fix)
        kept = [pair for pair in zip(groups, lies, strict=True) if isinstance(pair[0][0].value, GlobalTensor)]
        groups, lies = [group for group, _ in kept], [of for _, of in kept]
    check_same([first for first, *_ in groups], placement, "to_global")
    del held
    for of in lies:  # what was there before goes as the new comes
        group = groups.pop(0)
        put(group, _global(group[0], of), "to_global", fix)
    return module


def _lie(slot: TensorSlot, sbp: SbpLike, placement: Placement) -> Layout:
    own = f'give it a signature of its own, as in to_global(module, placement, {{"{slot.full}": flow.B, ...}})'
    return slot.laid(sbp, placement, f"to_global of {slot.full} {tuple(slot.value.shape)}: ", f"\n  {own}")


def _global(slot: TensorSlot, of: Layout) -> GlobalTensor:
    value = slot.value.detach()
    if isinstance(value, GlobalTensor):
        moved = value.to_global(placement=of.placement, sbp=of.sbp)
    else:
        moved = cut(value, of.placement, of.sbp)  # compared before, all at once
    moved._made = slot.full
    return replace(slot.value, moved)


def _reader(
    sbp: Any, module: nn.Module, names: list[str], placement: Placement
) -> Callable[[str, torch.Tensor], SbpLike]:
    if callable(sbp) and not isinstance(sbp, Split | Broadcast | Partial):
        return sbp  # type: ignore[no-any-return]
    if isinstance(sbp, Mapping) and not _by_axis(sbp, placement):
        patterns = dict(sbp)
        paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
        fits = {pattern: {*met(PathPattern.of(pattern, dots=True), names, among=paths)} for pattern in patterns}
        _unused(fits, names, placement)

        def look(name: str, value: torch.Tensor) -> SbpLike:
            found = next((pattern for pattern in patterns if name in fits[pattern]), None)
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


def _unused(fits: Mapping[str, Collection[str]], names: list[str], placement: Placement) -> None:
    axes = placement.names or ()
    for pattern, found in fits.items():
        if pattern not in axes and not found:
            raise SbpError(
                f"to_global: no parameter or buffer is called {pattern!r}, nor an axis of {placement!r}\n"
                f"  there are {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}\n"
                f"  {did_you_mean(pattern, [*names, *axes], 'write one of them')}"
            )
