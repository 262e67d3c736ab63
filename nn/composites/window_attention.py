"""Window attention: the mask is a band, so a rank's queries see its own keys and some of its neighbours'.

    6 tokens on 3 ranks, a window of 3      rank 1 has queries 2 3, and keys 0 1 2 3: two of rank 0, two of its own

Keys and values that a rank lacks come from the ranks before it, and behind it where the mask looks ahead; their
gradients go back there and are added. The width of the band is read off the mask itself, which so has to be known when
the graph is made. Inside of the band it may be anything.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sbp import B, S
from .attention_call import AttentionCall
from .axis import Axis, AxisValue
from .registry import composite

__all__ = ["Band", "band_of", "window"]


class Band(NamedTuple):
    """Query o sees no key before o + first, and none behind o + last."""

    first: int
    last: int


@composite("window", of="scaled_dot_product_attention", noun="attention")
def window(axis: Axis, *given: Any, **how: Any) -> AxisValue:
    """`scaled_dot_product_attention` under a banded mask, with S(sequence) in and out."""
    query, key, value, attn_mask, is_causal, scale, shared = AttentionCall.of(axis, *given, **how)
    length = query.shape[-2]
    if attn_mask is None or is_causal or key.shape[-2] != length or value.shape[-2] != length:
        told = (
            "is_causal"
            if is_causal
            else "no mask"
            if attn_mask is None
            else f"{length} queries of {key.shape[-2]} keys"
        )
        raise axis.refuse(
            f"{told}: every query may see keys far away",
            'pass a mask that is a band, such as attn_mask=(d >= 0) & (d < window), or use="ring"',
        )
    band = _band(axis, attn_mask, length)
    rows = query.lying(S(-2))
    keys, values = (x.seen(-2, length, *band) for x in (key, value))
    mask = attn_mask.lying(S(-2)) if attn_mask.ndim > 1 and attn_mask.shape[-2] > 1 else attn_mask.lying(B)
    width = band.last - band.first + 1
    parts = (rows, keys, values, mask, keys.indices(-2), width, scale, shared)
    mixed: AxisValue = axis.run(torch.ops.sbpflow.window_attention.default, *parts, gives=S(-2))
    return mixed


def _band(axis: Axis, mask: AxisValue, length: int) -> Band:
    known = axis.constant(mask)
    if known is None:
        raise axis.refuse(
            "the mask comes from outside, so that nobody knows how far a query sees",
            "make it in forward, of torch.arange or torch.ones(...).tril(), or note this module to use ring",
        )
    if known.ndim < 2 or known.shape[-2:] != (length, length):
        raise axis.refuse(
            f"the mask is {tuple(known.shape)}, and not of {length} queries and {length} keys",
            f"give it the last two dims ({length}, {length})",
        )
    band = band_of(known)
    if band is None:
        raise axis.refuse(
            "the mask lets some query see no key at all", "let every query see at least itself, or leave out the note"
        )
    piece = -(-length // axis.size)
    if band.last - band.first + piece >= length:
        raise axis.refuse(
            f"the mask is no band: queries see from {-band.first} keys before them to {band.last} behind, "
            f"so that a rank with {piece} queries needs all {length}",
            'use="ring" sends keys round, and no rank ever has more than two pieces of them',
        )
    return band


def band_of(mask: Tensor) -> Band | None:
    """The narrowest band that a mask leaves something of; None where a query sees nothing.

    >>> rows = torch.arange(5)[:, None] - torch.arange(5)
    >>> band_of((rows >= 0) & (rows < 3)), band_of(rows > 0)
    (Band(first=-2, last=0), None)
    """
    open_ = mask if mask.dtype is torch.bool else mask > -torch.inf
    length = mask.shape[-1]
    if not open_.numel() or not bool(open_.any(-1).all()):
        return None if open_.numel() else Band(0, 0)
    seen = open_.reshape(-1, *open_.shape[-2:]).any(0)
    places = torch.arange(length, device=mask.device)
    first = seen.int().argmax(-1) - places
    last = length - 1 - seen.flip(-1).int().argmax(-1) - places
    return Band(int(first.min()), int(last.max()))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    columns: Sequence[int],
    width: int,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention to these columns of the mask; `width` is that of its band, and only prices it."""
    if not query.numel():  # without queries: nothing, in a form through which gradients find their way
        return query[..., :1].expand(*query.shape[:-1], value.shape[-1]) * (key.sum() + value.sum())
    here: Any = attn_mask[..., columns[0] : columns[-1]] if columns else attn_mask[..., :0]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, here, scale=scale, enable_gqa=enable_gqa)


_library: Any = torch.library.Library("sbpflow", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "window_attention(Tensor query, Tensor key, Tensor value, Tensor attn_mask, int[] columns, int width, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)
_library.impl("window_attention", _attention, "CompositeImplicitAutograd")
