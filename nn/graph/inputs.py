"""The arguments of a step: their tensors by path, what of them a compiled step depends on, and how they are cut."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...boxing import box
from ...placement.errors import SbpError
from ...placement.world import device, owned
from ...sbp import Layout
from ..moving import shards_as
from ..tensor import GlobalTensor

__all__ = ["cutter", "key_of", "tensors_by_path"]


def tensors_by_path(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of arguments by where they stand: `0`, `1.mask`, `labels`."""
    found: dict[str, Tensor] = {}

    def look(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, list | tuple):
            for at, part in enumerate(value):
                look(f"{path}.{at}", part)
        elif isinstance(value, Mapping):
            for name, part in value.items():
                look(f"{path}.{name}", part)

    for at, value in enumerate(args):
        look(str(at), value)
    for name, value in kwargs.items():
        look(name, value)
    return found


def key_of(args: Sequence[Any], kwargs: Mapping[str, Any], modes: tuple[Any, ...]) -> Hashable:
    """What a compiled step depends on: shapes and dtypes of tensors, every other value, and the modes of modules."""
    return _key(tuple(args)), _key(dict(kwargs)), modes


def _key(value: Any) -> Hashable:
    if isinstance(value, GlobalTensor):
        return "global", value._layout.state, value._layout.placement, tuple(value.shape), value.dtype
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    if isinstance(value, Mapping):
        return (type(value), *((name, _key(part)) for name, part in value.items()))
    try:
        hash(value)
    except TypeError:
        raise SbpError(
            f"a graph cannot take a {type(value).__name__} as an argument: what if it changes?\n"
            "  pass tensors, numbers, strings, and lists, tuples or dicts of them"
        ) from None
    return type(value), value


def cutter(layout: Layout) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """How an argument is brought to a layout; of a plain tensor, which every process has whole, each takes its part."""
    whole = Layout(layout.placement, type(layout.state)(((),) * len(layout.shape)), layout.shape, layout.dtype)
    here = [device(layout.placement, rank) for rank in owned(layout.placement)]

    def cut(value: Tensor) -> tuple[Tensor, ...]:
        if isinstance(value, GlobalTensor):
            with torch.no_grad():
                return tuple(shard.detach() for shard in shards_as(value, layout, "input"))
        copies = [value.detach().to(where) for where in here] or [value.new_empty(0)]
        return tuple(copies) if whole is layout else box(copies, whole, layout, op="input")

    return cut
