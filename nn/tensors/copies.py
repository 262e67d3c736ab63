"""Files with global tensors: the name by which they have one made, and what `torch.load` may make of them."""

from typing import Any

import torch

from ...placement import Placement
from ...sbp import B, Layout, S
from ...sbp.signature import _partial
from ...sbp.state import State
from .tensor import assemble

__all__ = ["assemble", "install"]


def install() -> None:
    """Let `torch.load` read global tensors with weights_only too: of ours, only values are made."""
    made: list[Any] = [assemble, Layout, Placement, State, S, _partial, (B, "sbpflow.sbp.signature.B")]
    torch.serialization.add_safe_globals(made)
