"""Ring attention: an axis splits the sequence, every rank has its own queries, and keys and values go round.

    turn 0      rank i: its queries with its own keys and values, while these are sent to rank i + 1
    turn t      rank i: its queries with the keys and values of rank i - t, while these are sent on

What a rank has seen so far is kept as numerator and denominator of its softmax over the greatest logarithm of a sum
so far, and each turn adds to them; the last divides. Their gradients are the same for all turns up to that scale, so
that nothing is kept but queries, and the backward takes keys and values once more round the ring, the other way, where
their gradients go too.

With `is_causal` a rank computes only the part of each block that the mask leaves. Later ranks have more of it: turn t
waits for the last. So `striped` cuts the sequence in stripes, and every rank has a piece of each:

    8 tokens on 4 ranks      01 23 45 67        in 2 stripes      04 15 26 37
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sbp import B, S
from ...sbp.logical import Stripes
from ..graph.microbatch.attention_blocks import back, seen
from .attention_call import AttentionCall
from .axis import Axis, AxisValue
from .registry import composite

__all__ = ["divided", "part", "ring", "striped", "turns"]

aten = torch.ops.aten
STRIPES = 8  # by which ranks differ by an eighth at most in what they have to do


@composite("ring", of="scaled_dot_product_attention", noun="attention")
def ring(axis: Axis, *given: Any, **how: Any) -> AxisValue:
    """`scaled_dot_product_attention` with S(sequence) in and out."""
    return turns(axis, 1, AttentionCall.of(axis, *given, **how))


@composite("striped", of="scaled_dot_product_attention", noun="attention")
def striped(axis: Axis, *given: Any, **how: Any) -> AxisValue:
    """The same, with as much to do for every rank where it is causal: each has a piece of every stripe."""
    call = AttentionCall.of(axis, *given, **how)
    even = call.is_causal and call.mask is None
    return turns(axis, max(1, min(STRIPES, call.query.shape[-2] // axis.size)) if even else 1, call)


def turns(axis: Axis, stripes: int, call: AttentionCall) -> AxisValue:
    """Attention with keys and values that go round, of sequences in so many stripes."""
    call.check_shapes(axis)
    query, attn_mask, factor = call.query, call.mask, call.factor
    rows, keys, values = (x.striped(-2, stripes) for x in (query, call.key, call.value))
    mask = None if attn_mask is None else _on_rows(attn_mask, stripes)
    gives = [Stripes(-2, stripes) if stripes > 1 else S(-2), *[Stripes(-1, stripes) if stripes > 1 else S(-1)] * 2]
    state: tuple[AxisValue | None, ...] = (None, None, None)
    learns = mask is not None and mask.grad
    for turn in range(axis.size):
        held = keys.turned(turn)
        places = rows.indices(-2), held.indices(-2)
        given = (rows, held, values.turned(turn), mask, *state, *places, axis.size, call.is_causal, factor, learns)
        state = axis.run(part, *given, gives=gives, round=turn)
    return divided(axis, state, query.dtype, gives, axis.size)


def divided(axis: Axis, state: Sequence[Any], dtype: torch.dtype, gives: Sequence[Any], last: int) -> AxisValue:
    """The numerator over the denominator, in the last round; zero where nothing was seen."""
    (numerator, denominator, *_), (wide, narrow, *_) = state, gives
    nothing = axis.run(aten.eq.Scalar, denominator, 0, gives=narrow, round=last)
    safe = axis.run(aten.masked_fill.Scalar, denominator, nothing, 1.0, gives=narrow, round=last)
    each = axis.run(aten.unsqueeze.default, safe, -1, gives=wide, round=last)
    mixed: AxisValue = axis.run(aten.div.Tensor, numerator, each, gives=wide, round=last)
    if mixed.dtype is dtype:
        return mixed
    cast: AxisValue = axis.run(aten.to.dtype, mixed, dtype, gives=wide, round=last)
    return cast


def _on_rows(mask: AxisValue, stripes: int) -> AxisValue:
    """A mask with the rows of a rank's queries, where it has rows."""
    return mask.striped(-2, stripes) if mask.ndim > 1 and mask.shape[-2] > 1 else mask.lying(B)


@torch.library.custom_op("sbpflow::ring_part", mutates_args=())
def _part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    numerator: Tensor | None,
    denominator: Tensor | None,
    top: Tensor | None,
    rows: Sequence[int],
    columns: Sequence[int],
    parts: int,
    causal: bool,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The state of a rank's queries after one more block of keys; `parts` is of how many that is one.

    `rows` and `columns` are index ranges of the sequences that the queries and keys here are of.
    """
    if numerator is None or denominator is None or top is None:
        numerator, denominator, top = _nothing(query, value)
    if not query.numel() or not key.numel():
        return numerator.clone(), denominator.clone(), top.clone()
    made = []
    for strip in _strips(rows, columns, causal):
        mine, theirs = strip.mine, strip.theirs
        square, bias = _bias(query, mask, strip)
        out, sums = seen(query[..., mine, :], key[..., theirs, :], value[..., theirs, :], bias, scale, causal=square)
        sums = sums.to(top.dtype)
        if bias is not None:  # the kernel says of a row that sees nothing that its sum is one
            sums = sums.masked_fill((bias == -math.inf).all(-1), -math.inf)
        made.append((out.to(top.dtype), sums))
    out, sums = (
        made[0] if len(made) == 1 else (torch.cat([m[0] for m in made], -2), torch.cat([m[1] for m in made], -1))
    )
    highest = torch.maximum(top, sums)
    before, now = torch.exp(top - _finite(highest)), torch.exp(sums - _finite(highest))
    return numerator * before[..., None] + out * now[..., None], denominator * before + now, highest


@torch.library.custom_op("sbpflow::ring_part_backward", mutates_args=())
def _part_backward(
    above: Tensor,
    below: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    top: Tensor,
    rows: Sequence[int],
    columns: Sequence[int],
    causal: bool,
    scale: float,
    learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and mask from those of numerator (`above`) and denominator (`below`).

    A weight's is above @ value + below. Kernels subtract the products of `above` and the rows of a result instead, so
    they are given the rows along `above` of which these products are -below.
    """
    dmask = torch.zeros_like(mask) if learns and mask is not None else query.new_empty(0)
    if not query.numel() or not key.numel():
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), dmask
    length = torch.linalg.vector_norm(above, dim=-1, keepdim=True)
    inverse = torch.where(length > 0, 1 / length, 0.0)
    along = (-below[..., None] * inverse * (above * inverse)).to(query.dtype)
    grad, sums = above.to(query.dtype), _finite(top)
    wide = top.dtype
    dquery = torch.zeros_like(query)
    dkey, dvalue = (torch.zeros_like(x, dtype=wide) for x in (key, value))
    for strip in _strips(rows, columns, causal):
        mine, theirs = strip.mine, strip.theirs
        square, bias = _bias(query, mask, strip)
        q, k, v = query[..., mine, :], key[..., theirs, :], value[..., theirs, :]
        rests, tops = along[..., mine, :], sums[..., mine]
        found = back(grad[..., mine, :], q, k, v, bias, rests, tops, scale, causal=square, biased=learns)
        dquery[..., mine, :] = found[0]
        dkey[..., theirs, :] += found[1]
        dvalue[..., theirs, :] += found[2]
        if found[3] is not None and mask is not None:
            _add_columns(dmask, found[3], strip)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), dmask


part: torch._ops.OpOverload = torch.ops.sbpflow.ring_part.default


def _nothing(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    denominator = query.new_zeros(query.shape[:-1], dtype=wide)
    return (
        query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide),
        denominator,
        torch.full_like(denominator, -math.inf),
    )


def _finite(top: Tensor) -> Tensor:
    """The logarithm that sums are taken over; for a row that has seen nothing, that of one."""
    return top.masked_fill(top == -math.inf, 0.0)


class _Strip(NamedTuple):
    """Queries in one run, and the keys of which they may see something: the first of the block."""

    mine: slice
    theirs: slice
    rows: tuple[int, int]  # the places of these queries
    columns: tuple[int, ...]  # and of these keys, as ranges
    causal: bool  # whether it hides something


def _strips(rows: Sequence[int], columns: Sequence[int], causal: bool) -> Iterator[_Strip]:
    """The strips of a block: one for each run of queries if later keys are hidden, and else one.

    A strip that sees nothing keeps the first key, which is hidden.
    """
    if not causal:
        yield _Strip(slice(0, _count(rows)), slice(0, _count(columns)), (rows[0], rows[-1]), tuple(columns), False)
        return
    at = 0
    for lo, hi in zip(rows[::2], rows[1::2], strict=True):
        ranges = [(a, min(b, hi)) for a, b in zip(columns[::2], columns[1::2], strict=True) if a < hi]
        ranges = ranges or [(columns[0], columns[0] + 1)]
        seen_to = tuple(end for pair in ranges for end in pair)
        yield _Strip(slice(at, at + hi - lo), slice(0, _count(seen_to)), (lo, hi), seen_to, seen_to[-1] > lo + 1)
        at += hi - lo


def _bias(query: Tensor, mask: Tensor | None, strip: _Strip) -> tuple[bool, Tensor | None]:
    """Whether a strip is hidden above its diagonal and nowhere else, and otherwise the bias that hides."""
    bias, columns, (lo, hi) = None, strip.columns, strip.rows
    if mask is not None:
        mask = mask if mask.dim() > 1 else mask[None]
        mask = mask if mask.shape[-2] == 1 else mask[..., strip.mine, :]
        mask = mask if mask.shape[-1] == 1 else _picked(mask, columns)
        if mask.dtype is torch.bool:
            bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
        else:
            bias = mask.to(query.dtype)
        if bias.dim() == 3 and query.dim() == 4:  # which no kernel takes
            bias = bias[None]
        bias = bias.expand(*bias.shape[:-2], strip.mine.stop - strip.mine.start, _count(columns))
    if not strip.causal:
        return False, bias
    if bias is None and columns == strip.rows:
        return True, None
    ahead = _places(columns, query.device) > torch.arange(lo, hi, device=query.device)[:, None]
    hidden = query.new_zeros(ahead.shape).masked_fill_(ahead, -math.inf)
    return False, hidden if bias is None else bias + hidden


def _count(ranges: Sequence[int]) -> int:
    return sum(hi - lo for lo, hi in zip(ranges[::2], ranges[1::2], strict=True))


def _places(ranges: Sequence[int], device: torch.device) -> Tensor:
    found = [torch.arange(lo, hi, device=device) for lo, hi in zip(ranges[::2], ranges[1::2], strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _picked(mask: Tensor, columns: Sequence[int]) -> Tensor:
    found = [mask[..., lo:hi] for lo, hi in zip(columns[::2], columns[1::2], strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def _add_columns(dmask: Tensor, scores: Tensor, strip: _Strip) -> None:
    """Add the gradients of a strip of weights to those of a mask that was broadcast to them."""
    if dmask.dim() > 1 and dmask.shape[-2] > 1:
        dmask = dmask[..., strip.mine, :]
    at = 0
    for lo, hi in zip(strip.columns[::2], strip.columns[1::2], strict=True):
        piece = dmask if dmask.shape[-1] == 1 else dmask[..., lo:hi]
        piece += scores[..., at : at + hi - lo].sum_to_size(piece.shape).to(dmask.dtype)
        at += hi - lo


@_part.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _nothing(query, value)


@_part_backward.register_fake
def _(
    above: Tensor, below: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    learns = bool(rest[-1]) and mask is not None
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    return dquery, dkey, dvalue, torch.empty_like(mask) if learns and mask is not None else query.new_empty(0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, mask, _, _, before, ctx.rows, ctx.columns, _, ctx.causal, ctx.scale, ctx.learns = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(query, key, value, mask, before, output[2])


def _backward(ctx: Any, above: Tensor, below: Tensor, _: Any) -> tuple[Any, ...]:
    query, key, value, mask, before, top = ctx.saved_tensors
    found = torch.ops.sbpflow.ring_part_backward(
        above, below, query, key, value, mask, top, ctx.rows, ctx.columns, ctx.causal, ctx.scale, ctx.learns
    )
    dquery, dkey, dvalue, dmask = found
    numerator = denominator = None
    if before is not None:
        share = torch.exp(before - _finite(top))
        numerator, denominator = above * share[..., None], below * share
    return dquery, dkey, dvalue, dmask if ctx.learns else None, numerator, denominator, *[None] * 7


_part.register_autograd(_backward, setup_context=_remember)
