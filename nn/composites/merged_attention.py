"""Attention of queries that every rank has, and keys and values in pieces, such as when a long sequence is decoded.

Each rank computes what its own keys say: a numerator, a denominator, and the greatest logarithm that both are over.
These are merged, and only they are sent, however many keys there are:

    merged    the greatest of all by an all_reduce; then all numerators and denominators, over it, by another
    tree      in log2(n) steps: ranks i and i + 1 change what they have and put it together, then i and i + 2, i + 4 ...

In a tree both of a pair add the same two products, so that ranks end with the same bits wherever products and sums are
rounded apart, as torch's own kernels do.
"""

import math
from typing import Any

import torch

from ...sbp import B, P, S
from .attention_call import AttentionCall
from .axis import Axis, AxisValue
from .registry import composite
from .ring_attention import divided, part

__all__ = ["merged", "tree"]

aten = torch.ops.aten
HIGHEST = P("max")


@composite("merged", of="scaled_dot_product_attention", noun="attention")
def merged(axis: Axis, *given: Any, **how: Any) -> AxisValue:
    """`scaled_dot_product_attention` with queries B, keys and values S(sequence); the result is B."""
    call = AttentionCall.of(axis, *given, **how)
    numerator, denominator, top = _own(axis, call)
    bare = axis.run(aten.detach.default, top, gives=HIGHEST, grad=False)
    share = _share(axis, bare, bare.lying(B), P, 1)
    column = axis.run(aten.unsqueeze.default, share, -1, gives=P, round=1, grad=False)
    sums = axis.run(aten.mul.Tensor, _beside(axis, numerator, denominator, P, 0), column, gives=P, round=1)
    return _ratio(axis, sums.lying(B), call.value.shape[-1], call.query.dtype, 2)


@composite("tree", of="scaled_dot_product_attention", noun="attention")
def tree(axis: Axis, *given: Any, **how: Any) -> AxisValue:
    """The same, merged in pairs: of 2 ** k ranks in k steps."""
    if axis.size & (axis.size - 1):
        raise axis.refuse(
            f"the {axis.size} ranks of {axis.over} are no power of two, and pairs of pairs leave some out",
            'say use="merged", which any number of ranks do',
        )
    call = AttentionCall.of(axis, *given, **how)
    numerator, denominator, top = _own(axis, call)
    query, width = call.query, call.value.shape[-1]
    ones = [axis.size, *[1] * query.ndim]
    bare = axis.run(aten.detach.default, top, gives=P, grad=False)
    have = _beside(axis, _beside(axis, numerator, denominator, P, 0), bare, P, 0)
    every = axis.run(aten.new_ones.default, query.lying(B), ones, dtype=have.dtype, gives=B, grad=False)
    have = axis.run(aten.mul.Tensor, every.lying(S(0)), have, gives=S(0))  # a row for each rank
    for step in range(axis.size.bit_length() - 1):
        have = _merged_pair(axis, have, have.swapped(2**step), width, step + 1)
    last = axis.size.bit_length()
    sums = axis.run(aten.sum.dim_IntList, have, [0], gives=B, round=last)  # a rank's own row alone
    return _ratio(axis, sums, width, query.dtype, last)


def _own(axis: Axis, call: AttentionCall) -> tuple[AxisValue, AxisValue, AxisValue]:
    """Numerator, denominator and the logarithm they are over, of a rank's own keys."""
    call.check_shapes(axis)
    rows, keys, values = call.query.lying(B), call.key.lying(S(-2)), call.value.lying(S(-2))
    mask = None if call.mask is None else call.mask.lying(B)
    places = rows.indices(-2), keys.indices(-2)
    given = (rows, keys, values, mask, None, None, None, *places, axis.size, call.is_causal, call.factor)
    made: tuple[AxisValue, AxisValue, AxisValue] = axis.run(
        part, *given, mask is not None and mask.grad, gives=[P, P, HIGHEST]
    )
    return made


def _beside(axis: Axis, wide: AxisValue, narrow: AxisValue, gives: Any, number: int) -> AxisValue:
    """Rows with one more number each, at their end."""
    column = axis.run(aten.unsqueeze.default, narrow, -1, gives=narrow.sbp, round=number)
    made: AxisValue = axis.run(aten.cat.default, [wide, column], -1, gives=gives, round=number)
    return made


def _share(axis: Axis, top: AxisValue, highest: AxisValue, gives: Any, number: int) -> AxisValue:
    """By how much to scale what is over `top` to be over `highest`; zero where nothing was seen."""
    nothing = axis.run(aten.eq.Scalar, highest, -math.inf, gives=highest.sbp, round=number, grad=False)
    finite = axis.run(aten.masked_fill.Scalar, highest, nothing, 0.0, gives=highest.sbp, round=number, grad=False)
    over = axis.run(aten.sub.Tensor, top, finite, gives=gives, round=number, grad=False)
    share: AxisValue = axis.run(aten.exp.default, over, gives=gives, round=number, grad=False)
    return share


def _merged_pair(axis: Axis, mine: AxisValue, theirs: AxisValue, width: int, number: int) -> AxisValue:
    """One of what two ranks know: sums over the greater of their logarithms, and that."""
    rows = S(0)

    def cut(x: AxisValue, first: int, end: int, grad: bool) -> AxisValue:
        piece: AxisValue = axis.run(aten.slice.Tensor, x, -1, first, end, gives=rows, round=number, grad=grad)
        return piece

    tops = [cut(x, width + 1, width + 2, False) for x in (mine, theirs)]
    highest = axis.run(aten.maximum.default, *tops, gives=rows, round=number, grad=False)
    terms = [
        axis.run(
            aten.mul.Tensor,
            cut(x, 0, width + 1, True),
            _share(axis, top, highest, rows, number),
            gives=rows,
            round=number,
        )
        for x, top in zip((mine, theirs), tops, strict=True)
    ]
    sums = axis.run(aten.add.Tensor, *terms, gives=rows, round=number)
    made: AxisValue = axis.run(aten.cat.default, [sums, highest], -1, gives=rows, round=number)
    return made


def _ratio(axis: Axis, sums: AxisValue, width: int, dtype: torch.dtype, number: int) -> AxisValue:
    """The numerator over the denominator, which stands behind it."""
    numerator = axis.run(aten.slice.Tensor, sums, -1, 0, width, gives=B, round=number)
    denominator = axis.run(aten.select.int, sums, -1, width, gives=B, round=number)
    return divided(axis, (numerator, denominator), dtype, (B, B), number)
