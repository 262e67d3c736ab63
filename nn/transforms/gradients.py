"""`torch.autograd.grad` of global tensors, also for several gradients at once (`is_grads_batched`)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensors import autograd

__all__ = ["grad"]


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """As torch has it. Batched gradients are taken one by one, and what comes of them is stacked."""
    kept: dict[str, Any] = {
        "create_graph": create_graph,
        "allow_unused": allow_unused,
        "materialize_grads": materialize_grads,
    }
    if not is_grads_batched:
        return autograd.grad(outputs, inputs, grad_outputs, retain_graph, **kept)
    batches: Sequence[Any] = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    count = next(len(g) for g in batches if g is not None)
    each = [
        autograd.grad(outputs, inputs, [None if g is None else g[k] for g in batches], again, **kept)
        for k, again in enumerate([True] * (count - 1) + [retain_graph])
    ]
    return tuple([None if found[0] is None else torch.stack(found) for found in zip(*each, strict=True)])
