"""Copies and pickles of global tensors."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from ...placement import Placement
from ...placement.errors import SbpError
from ...placement.world import owned
from ...sbp import B, Layout, S
from ...sbp.signature import _partial
from ...sbp.state import State
from .tensor import GlobalTensor, wrap

__all__ = ["assemble", "attributes", "deep", "install", "is_param"]


def deep(x: GlobalTensor, memo: dict[int, Any]) -> GlobalTensor:
    """As torch copies a leaf: its values, its gradient and its attributes, not its hooks."""
    if not x.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment"
        )
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    made = assemble(tuple(shard.detach().clone() for shard in x._shards), x._layout, x.requires_grad, is_param(x))
    memo[id(x)] = made
    if x.grad is not None:
        made.grad = deep(x.grad, memo)
    vars(made).update({name: deepcopy(value, memo) for name, value in attributes(x).items()})
    return made


_OURS = {*GlobalTensor.__annotations__, *vars(GlobalTensor), "_is_param"}


def attributes(x: Tensor) -> dict[str, Any]:
    """Attributes that users hang on a tensor."""
    return {name: value for name, value in vars(x).items() if name not in _OURS}


def is_param(x: Tensor) -> bool:
    return bool(x.__dict__.get("_is_param", False))


def assemble(shards: tuple[Tensor, ...], of: Layout, requires_grad: bool, param: bool) -> GlobalTensor:
    """A leaf made of shards, as pickles and copies hold it."""
    here = owned(of.placement)
    if here and [tuple(shard.shape) for shard in shards] != [of.local_shape(rank) for rank in here]:
        raise SbpError(
            f"a file with a global tensor holds what the process that saved it owned: {of}\n"
            f"  that was {len(shards)} of shape {tuple(shards[0].shape)}; ranks {list(here)} are here\n"
            "  load what the same ranks saved, or save x.full_tensor(), which loads anywhere"
        )
    made = wrap(shards, of)
    if requires_grad:
        made.requires_grad_()
    if param:
        made._is_param = True
    return made


def install() -> None:
    """Let `torch.load` read global tensors with weights_only too: of ours, only values are made."""
    made: list[Any] = [assemble, Layout, Placement, State, S, _partial, (B, "sbpflow.sbp.signature.B")]
    torch.serialization.add_safe_globals(made)
