"""Chunked products: a product and the move beside it in pieces, so that one piece is computed while the next travels.

    x S(tokens), w S(out) -> S(out)    every rank's rows in n pieces: gather piece 0; product 0 while piece 1 is
                                       gathered; and so on, so that one gather of n is waited for
    x S(in), w S(in) -> S(tokens)      product 0; product 1 while the addends of product 0 are reduced and scattered

As many bytes are sent as in one move, and as much is computed. The hint on the weight, how it is to lie on the axis,
chooses between the two. Products of other weights are left as they are.
"""

from typing import Any

import torch
from torch import Tensor

from ...sbp import B, P, S, Split
from ..model.inside import Left
from .axis import Axis, AxisValue
from .registry import composite
from .row_product import PRODUCTS, RowProduct

__all__ = ["chunked"]

aten = torch.ops.aten
TOKENS = -2  # the dim of a product's rows that a sequence split cuts


@composite("chunked", of=PRODUCTS, noun="product")
def chunked(axis: Axis, *args: AxisValue, **kwargs: Any) -> AxisValue | Left:
    """A product of rows and a weight, in as many pieces as the axis has ranks."""
    product = RowProduct.of(axis, args, kwargs)
    if isinstance(product, Left):
        return product
    weight = product.weight
    lies = axis.rest(weight)
    if not isinstance(lies, Split):
        known = weight.name or "a weight"
        fix = f'say how it lies, as in flow.nn.shard(model, {{"{known}": {{"{axis.over}": flow.S(0)}}}})'
        return axis.leave(f"{known} {weight.shape} is not said to be split over {axis.over}", fix)
    return (_gathered if lies.dim == product.out else _scattered)(axis, product)


def _gathered(axis: Axis, product: RowProduct) -> AxisValue:
    """Pieces of every rank's rows, gathered one after the other; each rank has its columns of all."""
    count, rows, out = axis.size, S(TOKENS), S(-1)
    held = product.weight.lying(S(product.out))
    pieces = axis.run(cut, product.x.lying(rows), TOKENS, count, count, gives=[rows] * count)
    parts = [axis.run(product.op, piece.lying(B), held, gives=out, round=at + 1) for at, piece in enumerate(pieces)]
    whole: AxisValue = axis.run(joined, parts, TOKENS, count, gives=out, round=count + 1)
    return whole if product.bias is None else _added(axis, whole, product.bias.lying(S(0)), out, count + 1)


def _scattered(axis: Axis, product: RowProduct) -> AxisValue:
    """Addends of pieces of every rank's rows, reduced and scattered one after the other."""
    count, rows, inner = axis.size, S(TOKENS), S(-1)
    pieces = axis.run(cut, product.x.lying(inner), TOKENS, count, count, gives=[inner] * count)
    held = product.weight.lying(S(1 - product.out))
    parts = [axis.run(product.op, piece, held, gives=P, round=at + 1).lying(rows) for at, piece in enumerate(pieces)]
    whole: AxisValue = axis.run(joined, parts, TOKENS, count, gives=rows, round=count + 1)
    return whole if product.bias is None else _added(axis, whole, product.bias.lying(B), rows, count + 1)


def _added(axis: Axis, x: AxisValue, bias: AxisValue, gives: Split, number: int) -> AxisValue:
    made: AxisValue = axis.run(aten.add.Tensor, x, bias, gives=gives, round=number)
    return made


# A dim in so many blocks, each of them in pieces: piece k of all blocks, one behind the other. The blocks are those of
# the ranks; a rank that has only its own has one.
_library: Any = torch.library.Library("sbpflow", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("cut_pieces(Tensor x, int dim, int count, int blocks) -> Tensor[]")
_library.define("joined_pieces(Tensor[] pieces, int dim, int blocks) -> Tensor")


def _cut(x: Tensor, dim: int, count: int, blocks: int) -> list[Tensor]:
    each = [block.tensor_split(count, dim) for block in x.tensor_split(blocks, dim)]
    return list(each[0]) if blocks == 1 else [torch.cat(pieces, dim) for pieces in zip(*each, strict=True)]


def _joined(pieces: list[Tensor], dim: int, blocks: int) -> Tensor:
    if blocks == 1:
        return torch.cat(pieces, dim)
    total = sum(piece.shape[dim] for piece in pieces)
    sizes = [_piece_sizes(block, len(pieces)) for block in _piece_sizes(total, blocks)]
    each = [torch.split(piece, [size[k] for size in sizes], dim) for k, piece in enumerate(pieces)]
    return torch.cat([part for block in zip(*each, strict=True) for part in block], dim)


def _piece_sizes(size: int, count: int) -> list[int]:
    return [size // count + (k < size % count) for k in range(count)]


_library.impl("cut_pieces", _cut, "CompositeImplicitAutograd")
_library.impl("joined_pieces", _joined, "CompositeImplicitAutograd")
cut: torch._ops.OpOverload = torch.ops.sbpflow.cut_pieces.default
joined: torch._ops.OpOverload = torch.ops.sbpflow.joined_pieces.default
