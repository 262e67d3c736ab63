"""Attention of a block of queries and a block of keys: the weighted values, and the logarithms of the sums of weights.

Blocks of other keys are put together by these sums. On CPU a fused kernel never holds all weights at once.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["back", "seen"]


def _fused(query: Tensor, value: Tensor) -> bool:
    """Whether a kernel is there that never holds all weights at once; on cards there is none that hides by place."""
    return query.device.type == "cpu" and query.dim() == 4 and query.shape[-1] == value.shape[-1]


def seen(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The attention, and the logarithms of the sums of its weights; minus infinity where a row sees nothing.

    `causal` hides by the place in the block, `bias` is added to the weights' logarithms.
    """
    key, value = _each_head(query, key), _each_head(query, value)
    if _fused(query, value):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
        return out.contiguous(), sums.contiguous()
    weights = _weights(query, key, bias, scale, causal)
    sums = torch.logsumexp(weights, -1)
    return (_shares(weights, sums) @ value.to(weights.dtype)).to(query.dtype), sums


def back(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor,
    scale: float,
    *,
    causal: bool = False,
    biased: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key and value, and with `biased` that of the weights' logarithms.

    Weights are those of all keys whose sums are given. `out` counts only in its products with `grad`, row by row.
    """
    heads = key.shape[-3] if key.dim() > 2 else 1
    key, value = _each_head(query, key), _each_head(query, value)
    weights: Any = None
    if _fused(query, value) and not biased:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        dquery, dkey, dvalue = kernel(grad, query, key, value, out, sums, 0.0, causal, attn_mask=bias, scale=scale)
    else:
        weights = _weights(query, key, bias, scale, causal)
        wide = weights.dtype
        shares, above = _shares(weights, sums), grad.to(wide)
        inner = above @ value.to(wide).transpose(-2, -1) - (above * out.to(wide)).sum(-1, keepdim=True)
        weights = shares * inner
        dvalue = shares.transpose(-2, -1) @ above
        dquery, dkey = weights @ key.to(wide) * scale, weights.transpose(-2, -1) @ query.to(wide) * scale
    dquery = dquery.to(query.dtype).contiguous()
    return dquery, _shared_heads(dkey, heads), _shared_heads(dvalue, heads), weights if biased else None


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The logarithms of the weights, up to a row's own constant; in single precision for inputs of half."""
    wide = torch.promote_types(query.dtype, torch.float32)
    weights = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    if causal:
        ahead = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).triu_(1)
        weights = weights.masked_fill(ahead, -torch.inf)
    return weights if bias is None else weights + bias.to(wide)


def _shares(weights: Tensor, sums: Tensor) -> Tensor:
    """A row that sees nothing takes nothing."""
    return torch.exp(weights - sums.masked_fill(sums == -torch.inf, 0.0)[..., None])


def _each_head(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values for each head of the queries, of which several may share one."""
    return (
        x if x.dim() < 3 or x.shape[-3] == query.shape[-3] else x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
    )


def _shared_heads(grad: Tensor, heads: int) -> Tensor:
    return grad if grad.dim() < 3 or grad.shape[-3] == heads else torch.unflatten(grad, -3, (heads, -1)).sum(-3)
