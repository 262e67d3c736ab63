"""Tokens: what a process carries through an op on ranks that are not its own.

A token is empty, but it has the autograd edges of the real result, so that a backward pass on every process reaches the
transfers it takes part in, in one order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["pass_tokens"]


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtypes: Sequence[torch.dtype], *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.kinds = [(token.dtype, token.device) for token in tokens]
        made = tuple(torch.empty(0, dtype=dtype, device=tokens[0].device) for dtype in dtypes)
        ctx.mark_non_differentiable(*(t for t in made if not (t.is_floating_point() or t.is_complex())))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *(torch.empty(0, dtype=dtype, device=device) for dtype, device in ctx.kinds)


def pass_tokens(tokens: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    """A token for each result of an op that was given these."""
    if torch.is_grad_enabled() and any(token.requires_grad for token in tokens):
        return _Link.apply(dtypes, *tokens)  # type: ignore[no-any-return,no-untyped-call]
    return tuple(torch.empty(0, dtype=dtype, device=tokens[0].device) for dtype in dtypes)
