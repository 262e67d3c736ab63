"""Kernels of cards that are not here, for which a step is only planned: the CPU in their place would pick others.

Attention whose values are narrower than its keys, as in DeepSeek, is one kernel on a card. The CPU has none for it, and
takes products and a softmax, which hold all scores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_on_card"]

aten = torch.ops.aten


def as_on_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a card would run in the place of this one."""
    return _attention if function is aten.scaled_dot_product_attention.default else function


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
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), -torch.inf)
        bias = bias.expand(*query.shape[:3], key.shape[2])
    kernel = aten._scaled_dot_product_efficient_attention.default
    found: Tensor = kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
    return found
