"""Attention: batch and heads split, query rows too where they do not count their place; linear in values."""

from collections.abc import Hashable
from math import prod

from ..call import Call, Match
from ..registry import register
from .labels import aligned, broadcast, labelled, named, position

__all__: list[str] = []


@register("scaled_dot_product_attention")
def attention(call: Call) -> Match | None:
    """With dropout the book is silent: ranks must draw as one."""
    bound = call.bound
    query, key, value, mask = (bound[name] for name in ("query", "key", "value", "attn_mask"))
    if bound["dropout_p"] != 0.0:
        return None
    batch: list[Hashable] = [("batch", d) for d in range(call.outputs[0].dim() - 2)]
    rows = None if bound["is_causal"] else "rows"
    whole = (*broadcast(query.shape[:-2], *([] if bound["enable_gqa"] else [key.shape[:-2], value.shape[:-2]])),)

    def dims(shape: tuple[int, ...], *last: Hashable) -> list[Hashable]:
        return [*aligned(shape[:-2], whole, batch), *last]

    labels = {
        "query": dims(query.shape, rows, None),
        "key": dims(key.shape, None, None),
        "value": dims(value.shape, None, "width"),
    }
    if mask is not None:
        full = (*whole, query.shape[-2], key.shape[-2])
        labels["attn_mask"] = aligned(mask.shape, full, [*batch, rows, None])
    out: list[Hashable] = [*batch, rows, "width"]
    if bound["enable_gqa"] and key.shape[-3] not in (1, query.shape[-3]):
        _share_heads(call, labels, out)
    return labelled(call, named(call, **labels), [out], linear=[(position(call, "value"),)])


@register("sbpflow::attend")
def slices(call: Call) -> Match:
    """Attention of a slice of a sequence that looks back: batch and heads split."""
    bound = call.bound
    query, key, mask = (bound[name] for name in ("query", "key", "mask"))
    batch: list[Hashable] = [("batch", d) for d in range(query.dim() - 2)]
    labels: dict[str, list[Hashable]] = {
        "query": [*batch, None, None],
        "key": [*batch, None, None],
        "value": [*batch, None, None],
        "past": [None],
    }
    if mask is not None:
        labels["mask"] = aligned(mask.shape, (*query.shape[:-1], mask.shape[-1]), [*batch, None, None])
    out: list[Hashable] = [*batch, None, None]
    if key.shape[:-2] != query.shape[:-2]:
        _share_heads(call, labels, out)
    return labelled(call, named(call, **labels), [out, out[:-1]])


def _share_heads(call: Call, labels: dict[str, list[Hashable]], out: list[Hashable]) -> None:
    """Several query heads use one of the keys': they are split together, and only if every rank has as many."""
    even = bool(call.sizes) and call.bound["key"].shape[-3] % prod(call.sizes) == 0
    for name in ("key", "value", "query"):
        labels[name][-3] = "heads" if even else None
    out[-3] = "heads" if even else None
    for mask in (labels[name] for name in ("attn_mask", "mask") if name in labels):
        if len(mask) > 2 and mask[-3] is not None:
            mask[-3] = out[-3]
