"""Products of matrices that lie in blocks: SUMMA on two axes, with depth on three, and on a cube.

    summa over row, col          x S(0) over row, S(-1) over col; the weight's blocks: what goes in over row, what comes
                                 out over col; the result as x. In q steps every row of ranks gathers a panel of x and
                                 every column one of the weight, and adds their product to what it has
    summa over depth, row, col   rows of x over depth too, so that blocks of x are smaller by as much, and depth x as
                                 many ranks have each block of the weight
    cube over i, j, l            rows over i, what comes out over j, what goes in over l: x is gathered over j, the
                                 weight over i, and the result reduced and scattered over l. The second of more dims
                                 than two lies in pieces over j before and over l behind; of two, the rows do

A panel has equal parts of all blocks of a row of ranks, so that all ranks send at once where one would broadcast at
each step. As many bytes go, and no rank waits for one. The backward gathers panels again, and keeps blocks alone.
"""

from typing import Any

import torch

from ...sbp import P, S
from ..model.inside import Left
from .axis import Axis, AxisValue
from .chunked import cut
from .registry import composite
from .row_product import PRODUCTS, RowProduct

__all__ = ["cube", "summa"]

aten = torch.ops.aten


@composite("summa", of=PRODUCTS, noun="product", axes=(2, 3))
def summa(axis: Axis, *args: AxisValue, **kwargs: Any) -> AxisValue | Left:
    """A product of blocks over rows and columns of ranks, perhaps several times side by side."""
    *depth, row, col = axis.axes
    if row.size != col.size:
        raise axis.refuse(
            f"{row.over} has {row.size} ranks and {col.over} {col.size}: a panel would not be the same of both",
            "lay the ranks in a square, with another axis for the rest, as in over=(depth, row, col)",
        )
    found = _product(axis, args, kwargs)
    if isinstance(found, Left):
        return found
    x, weight, bias, last = found
    rows, inner = {line: S(0) for line in (*depth, row)}, S(x.ndim - 1)
    count, total = row.size, None
    left = axis.within(col, rows).run(cut, x.lying(inner), -1, count, count, gives=[inner] * count)
    right = axis.within(row, {col: S(last)}).run(
        cut, weight.lying(S(1 - last)), 1 - last, count, count, gives=[S(1 - last)] * count
    )
    gives = {**rows, col: inner}
    for step, (a, b) in enumerate(zip(left, right, strict=True), 1):
        a = axis.call(aten.alias.default, a, lies=gives)
        b = axis.call(aten.alias.default, b, lies={row: S(1 - last), col: S(last)})
        more = axis.call(found.op, a, b, lies=gives, round=step)
        total = more if total is None else axis.call(aten.add.Tensor, total, more, lies=gives, round=step)
    assert total is not None
    return total if bias is None else axis.call(aten.add.Tensor, total, bias, lies=gives)


@composite("cube", of=PRODUCTS, noun="product", axes=3)
def cube(axis: Axis, *args: AxisValue, **kwargs: Any) -> AxisValue | Left:
    """A product of which every rank of a cube has a part: rows i, columns j, and the terms l of sums."""
    found = _product(axis, args, kwargs)
    if isinstance(found, Left):
        return found
    x, weight, bias, last = found
    i, j, l = axis.axes  # noqa: E741
    inner, tokens = S(x.ndim - 1), S(1 if x.ndim > 2 else 0)
    x = axis.call(aten.alias.default, x, lies={i: S(0), j: tokens, l: inner})
    weight = axis.call(aten.alias.default, weight, lies={i: S(1 - last), l: S(1 - last), j: S(last)})
    parts = axis.call(found.op, x, weight, lies={i: S(0), l: P, j: inner})
    gives = {i: S(0), l: tokens, j: inner}
    total = axis.call(aten.alias.default, parts, lies=gives)
    return total if bias is None else axis.call(aten.add.Tensor, total, bias, lies=gives)


def _product(axis: Axis, args: tuple[AxisValue, ...], kwargs: dict[str, Any]) -> RowProduct | Left:
    """The product that a call is, of any sizes but none."""
    found = RowProduct.of(axis, args, kwargs)
    if isinstance(found, RowProduct) and 0 in (*found.x.shape, *found.weight.shape):
        sizes = f"{found.x.shape} and {found.weight.shape}"
        return axis.leave(f"{axis.name} of {sizes} has nothing to multiply", "pass a batch that has rows")
    return found
