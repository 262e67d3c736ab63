"""Attention: batch and heads split, query rows too where they do not count their place; linear in values.

Where several query heads share one of the keys', both are split as long as there are enough; then queries alone.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Match, Piece, Rewritten
from ..rule import register
from .labels import aligned, broadcast, called_with, labelled, named, position

__all__: list[str] = []


@register("scaled_dot_product_attention", "sbpflow::window_attention")
def attention(call: Call) -> Match | None:
    """Attention is split only without dropout, because with it ranks must draw as one. A window's rows are left to its
    composite."""
    bound = call.bound
    query, key, value, mask = (bound[name] for name in ("query", "key", "value", "attn_mask"))
    if bound.get("dropout_p", 0.0) != 0.0:
        return None
    batch: list[Hashable] = [("batch", d) for d in range(call.outputs[0].dim() - 2)]
    rows = None if bound.get("is_causal", True) else "rows"
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
    linear = [(position(call, "value"),)]
    if not bound["enable_gqa"] or key.shape[-3] in (1, query.shape[-3]):
        return labelled(call, named(call, **labels), [out], linear=linear)
    _share_heads(labels, out)
    keys: Mapping[Hashable, tuple[int, Iterable[int]]] = {
        "heads": (key.shape[-3], (position(call, "key"), position(call, "value")))
    }
    return labelled(call, named(call, **labels), [out], linear=linear, shared=keys, local=_own_heads(call))


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
    if key.shape[:-2] == query.shape[:-2]:
        return labelled(call, named(call, **labels), [out, out[:-1]])
    _share_heads(labels, out)
    return labelled(call, named(call, **labels), [out, out[:-1]], shared={"heads": (key.shape[-3], ())})


@register("sbpflow::ring_part")
def blocks(call: Call) -> Match:
    """A part of attention for one more block of keys: batch and heads split; the sequences as its composite says."""
    bound = call.bound
    query, key, mask = (bound[name] for name in ("query", "key", "mask"))
    batch: list[Hashable] = [("batch", d) for d in range(query.dim() - 2)]
    labels: dict[str, list[Hashable]] = {name: [*batch, None, None] for name in ("query", "key", "value", "numerator")}
    labels["denominator"] = labels["top"] = [*batch, None]
    if mask is not None:
        full = (*query.shape[:-1], mask.shape[-1])
        labels["mask"] = aligned(mask.shape, full, [*batch, None, None])
    out: list[Hashable] = [*batch, None, None]
    if key.shape[:-2] == query.shape[:-2]:
        return labelled(
            call, named(call, **labels), [out, out[:-1], out[:-1]], local=Rewritten(partial(_seen, call.op))
        )
    _share_heads(labels, out)
    for name in ("numerator", "denominator", "top"):
        labels[name] = out if name == "numerator" else out[:-1]
    keys: Mapping[Hashable, tuple[int, Iterable[int]]] = {
        "heads": (key.shape[-3], (position(call, "key"), position(call, "value")))
    }
    own = _own_heads(call)
    local = Rewritten(partial(_seen, call.op, own=own.rewrite if own else None))
    return labelled(call, named(call, **labels), [out, out[:-1], out[:-1]], shared=keys, local=local)


def _seen(
    op: Any, piece: Piece, *args: Any, own: Callable[..., Any] | None = None, **kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Skip a block in which no row sees anything. Places are left out where they hide nothing, so that ranks and rounds
    run the same."""
    names = [parameter.name for parameter in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    rows, columns, causal = given["rows"], given["columns"], given["causal"]
    before = given["numerator"], given["denominator"], given["top"]
    if rows and columns and causal:
        if rows[-1] <= columns[0] and before[0] is not None:
            return _as_before, before
        causal = columns[-1] > rows[0] + 1
    if given["mask"] is None and (not causal or (rows == columns and len(rows) == 2)):
        counts = ([0, sum(hi - lo for lo, hi in zip(each[::2], each[1::2], strict=True))] for each in (rows, columns))
        given["rows"], given["columns"] = counts
    given["causal"] = causal
    args = tuple(given[name] for name in names)
    return own(piece, *args) if own else (op, args)


def _as_before(*state: Tensor) -> tuple[Tensor, ...]:
    return state


def _share_heads(labels: dict[str, list[Hashable]], out: list[Hashable]) -> None:
    """Several query heads use one of the keys': they are split together."""
    for name in ("key", "value", "query"):
        labels[name][-3] = "heads"
    out[-3] = "heads"
    for mask in (labels[name] for name in ("attn_mask", "mask") if name in labels):
        if len(mask) > 2 and mask[-3] is not None:
            mask[-3] = "heads"


def _own_heads(call: Call) -> Rewritten | None:
    """Where ranks have some of the query heads and all of the keys', each takes those that its own look at."""
    heads, keys = (call.bound[name].shape[-3] for name in ("query", "key"))
    if keys % prod(call.sizes) == 0:
        return None  # no split leaves the keys whole
    query, key = position(call, "query"), position(call, "key")

    def rewrite(piece: Piece, *args: Any, **kwargs: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        mine = [head * keys // heads for lo, hi in piece.spans(query, -3) for head in range(lo, hi)]
        some = len(mine) < heads and sum(hi - lo for lo, hi in piece.spans(key, -3)) == keys
        return (partial(_of_heads, call.op, mine, **kwargs) if some else partial(call.op, **kwargs)), args

    return Rewritten(rewrite)


def _of_heads(op: Any, mine: list[int], *args: Any, **kwargs: Any) -> Any:
    """Attention of query heads that look at these heads of the keys."""
    first, count = mine[0], mine[-1] + 1 - mine[0]
    even = len(mine) % count == 0 and all(head - first == at * count // len(mine) for at, head in enumerate(mine))

    def own(x: Tensor) -> Tensor:
        return x.narrow(-3, first, count) if even else x.index_select(-3, torch.tensor(mine, device=x.device))

    given = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    return called_with(op, args, kwargs, key=own(given["key"]), value=own(given["value"]))
