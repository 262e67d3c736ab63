"""Attention of a sequence that is split, by splitting heads in its place: one all_to_all before, one behind.

    ulysses     S(sequence) -> S(heads), attention of whole sequences, S(heads) -> S(sequence)
    usp         so over one axis, and over the other the ring: each of U x R ranks has 1/U of the heads, and keys and
                values of 1/R of the sequence go round

Where heads are split, ranks do what the rule of attention says, so that other axes may split batch and heads too. When
the axis of heads is the outer of the two, a rank has U stripes of the sequence, and else one run of it.
"""

from typing import Any

import torch

from ...sbp import S
from .attention_call import AttentionCall
from .axis import Axis, AxisLine, AxisValue
from .registry import composite
from .ring_attention import turns

__all__ = ["ulysses", "usp"]

aten = torch.ops.aten
SEQUENCE, HEADS = -2, -3


@composite("ulysses", of="scaled_dot_product_attention", noun="attention")
def ulysses(axis: Axis, query: AxisValue, key: AxisValue, value: AxisValue, *more: Any, **how: Any) -> AxisValue:
    """`scaled_dot_product_attention` with S(sequence) in and out, and S(heads) meanwhile."""
    AttentionCall.of(axis, query, key, value, *more, **how).check_shapes(axis)
    (line,) = axis.axes
    _check_split(axis, line, query)
    heads, rows = S(query.ndim + HEADS), S(query.ndim + SEQUENCE)
    query, key, value = (axis.call(aten.alias.default, x, lies=rows) for x in (query, key, value))
    mixed = axis.call(axis.op.op, query, key, value, *more, lies=heads, **how)
    made: AxisValue = axis.call(aten.alias.default, mixed, lies=rows)
    return made


@composite("usp", of="scaled_dot_product_attention", noun="attention", axes=2)
def usp(axis: Axis, query: AxisValue, key: AxisValue, value: AxisValue, *more: Any, **how: Any) -> AxisValue:
    """The same over the first axis, and the ring over the second."""
    line, around = axis.axes
    _check_split(axis, line, query)
    heads, rows = S(query.ndim + HEADS), S(query.ndim + SEQUENCE)
    both = {line: rows, around: rows}
    query, key, value = (axis.call(aten.alias.default, x, lies=both) for x in (query, key, value))
    stripes = line.size if line.at < around.at else 1
    inner = axis.within(around, {line: heads})
    mixed = turns(inner, stripes, AttentionCall.of(inner, query, key, value, *more, **how))
    made: AxisValue = axis.call(aten.alias.default, mixed, lies=both)
    return made


def _check_split(axis: Axis, line: AxisLine, query: AxisValue) -> None:
    """As rules have it: heads are split evenly, or so that ranks differ by a quarter at most."""
    heads = query.shape[HEADS] if query.ndim > 2 else 1
    if heads % line.size and heads < 4 * line.size:
        fits = max(n for n in range(1, heads + 1) if heads % n == 0 and line.size % n == 0)
        both = f'; or use="usp" over an axis of {fits} ranks and one of {line.size // fits}' if fits > 1 else ""
        raise axis.refuse(
            f"{heads} heads cannot be split over the {line.size} ranks of {line.over}",
            f'say use="ring", which splits no heads{both}',
        )
