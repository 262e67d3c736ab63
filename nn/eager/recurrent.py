"""LSTM, GRU and RNN of several layers: each layer an op that may be split along samples, with dropout between them.

torch's own Python formula, which would be captured otherwise, unrolls time and forgets the dropout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...sbp.recurrent import KINDS, recurrent

__all__ = ["FORMULAS", "stacked"]

Drop = Callable[[Tensor, float], Tensor]


def _drop(x: Tensor, p: float) -> Tensor:
    return torch.dropout(x, p, train=True)


def stacked(
    kind: str,
    x: Tensor,
    lengths: Tensor | None,
    hx: Any,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    *,
    drop: Drop = _drop,
) -> list[Tensor]:
    """The outputs of the last layer and the last states of all; `x` has time first, and `drop` is between layers."""
    states = list(hx) if kind == "lstm" else [hx]
    device = x.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if narrow is not None and not (kind == "gru" and device == "cpu"):
        x, *states = _narrowed([x, *states], narrow)
        weights = _narrowed(weights, narrow)
    ways = 1 + both
    each = len(weights) // layers
    ends = []
    for i in range(layers):
        held = [s.narrow(0, i * ways, ways) for s in states] if layers > 1 else states
        x, *last = recurrent(x, lengths, held, list(weights[i * each : (i + 1) * each]), kind, biases, both, narrow)
        ends.append(last)
        if train and dropout and i + 1 < layers:
            x = drop(x, dropout)
    return [x, *(torch.cat(parts) if layers > 1 else parts[0] for parts in zip(*ends, strict=True))]


def _narrowed(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As autocast gives them to the kernel: it knows torch's, and not this op. A GRU has none of its own on CPU."""
    return [t.to(dtype) if t.dtype.is_floating_point and t.dtype is not torch.float64 else t for t in tensors]


def _of(kind: str) -> Callable[..., Any]:
    """The formula of torch's function of this name, with its arguments."""

    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        first = x.transpose(0, 1) if batch_first else x
        rest = has_biases, num_layers, dropout, train, bidirectional
        out, *ends = stacked(kind, first, None, hx, params, *rest)
        return out.transpose(0, 1) if batch_first else out, *ends

    return run


# By torch's ops.
FORMULAS = {getattr(torch.ops.aten, kind).input: _of(kind) for kind in KINDS}
