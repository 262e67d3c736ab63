"""Kernels of cards that are not here, for which a step is only planned: the CPU in their place would pick others.

Attention whose values are narrower than its keys, as in DeepSeek, is one kernel on a card, and so is a root mean square
norm. The CPU has none for them: it takes products and a softmax, which hold all scores, or pointwise ops in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_on_card"]

aten = torch.ops.aten


def as_on_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a card would run in the place of this one."""
    return _STAND_INS.get(function, function)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    plain = aten.scaled_dot_product_attention.default
    heads = {x.shape[:2] for x in (query, key, value) if x.dim() == 4}
    if value.shape[-1] == key.shape[-1] or len(heads) != 1 or query.dtype == torch.float64:  # both take the like
        same: Tensor = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return same
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    kernel = aten._scaled_dot_product_efficient_attention.default
    found: Tensor = kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return found


class _Norm(torch.autograd.Function):
    """A norm of which the backward reads what it was of, and the root, as the kernel's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        y, root = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, root, *(() if weight is None else (weight,)))
        ctx.shape = shape
        found: Tensor = y
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, root, *weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], bool(weight) and ctx.needs_input_grad[2]]
        given = grads[0], x, ctx.shape, root, weight[0] if weight else None
        of_x, of_weight = aten._fused_rms_norm_backward.default(*given, wanted)
        return of_x, None, of_weight if wanted[1] else None, None


def _norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    found: Tensor = _Norm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]
    return found


_STAND_INS: dict[Callable[..., Any], Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.rms_norm.default: _norm,
}
