"""Servers of a model's weights: each has some of them, whole, and all have about as many bytes."""

from typing import TypeVar

import torch
from torch import nn

from ...placement import Placement
from ...placement.errors import SbpError
from ...sbp import Layout, State
from ..model.slots import slots, tied
from ..model.values.materialise import make_global
from ..owners.balance import shared_out, whole_on
from ..tensors.factories import check_values
from ..tensors.tensor import GlobalTensor

__all__ = ["to_servers"]

M = TypeVar("M", bound=nn.Module)


def to_servers(model: M, servers: Placement) -> M:
    """Make a model global, in place, each parameter and buffer whole on one of these ranks; returns it.

    The largest go first, to who has the least bytes so far: nobody has more than the mean and the largest tensor
    together. One that is larger than a server's share is better cut: `flow.nn.to_global(model, servers, S(0))` gives
    each server a piece of all. Tied parameters go together; what is on meta is made where it lies.
    """
    groups = list(tied(slots({"": model})).values())
    for first, *_ in groups:
        if isinstance(first.value, GlobalTensor):
            raise SbpError(
                f"to_servers: {first.full} is global already, {first.value.sbp} on {first.value.placement}\n"
                "  give it the model before that, and make the optimizer behind it"
            )
        if not first.value.is_meta:
            check_values(first.value, f"to_servers of {first.full}")
    held = [Layout(servers, State(((),) * of.value.ndim), tuple(of.value.shape), of.value.dtype) for of, *_ in groups]
    ranks = shared_out([(servers, of.nbytes) for of in held])
    lies = {id(of.value): whole_on(rank, there) for (of, *_), rank, there in zip(groups, ranks, held, strict=True)}
    fix = "make the optimizer after flow.nn.to_servers(model, ...)"
    make_global({"": model}, lies, torch.device(servers.type), "to_servers", fix)
    return model
