"""Dims renamed, dropped, added or repeated: permute, squeeze, expand and their like."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Match, Piece, Rewritten, Way
from ..rule import register
from .labels import aligned, labelled

__all__: list[str] = []


@register(
    "permute", "transpose.int", "t", "mT", "mH", "adjoint", "matrix_H", "numpy_T", "swapaxes", "swapdims",
    "movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist",
)  # fmt: skip
def permute(call: Call) -> Match:
    """The order of the dims is that in which the op puts a tensor whose sizes are all different."""
    ndim = call.inputs[0].dim()
    marked = torch.empty(tuple(range(2, 2 + ndim)), device="meta", dtype=call.inputs[0].dtype)
    names = tuple(name for name in call.bound if name != "self")
    order = [size - 2 for size in call.op(marked, *(call.bound[name] for name in names)).shape]
    return labelled(call, [range(ndim)], [order], linear=[(0,)], hollow=True)


@register("unsqueeze")
def unsqueeze(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    out: list[int | None] = list(range(ndim))
    out.insert(call.bound["dim"] % (ndim + 1), None)
    return labelled(call, [range(ndim)], [out], linear=[(0,)], hollow=True)


@register("squeeze", "squeeze.dim", "squeeze.dims")
def squeeze(call: Call) -> Match:
    """Only dims whose logical size is one go, whatever size a rank's piece of another has."""
    shape = call.inputs[0].shape
    asked = call.bound.get("dim", range(len(shape)))
    wanted = {d % max(len(shape), 1) for d in ([asked] if isinstance(asked, int) else asked)}
    gone = [d for d in sorted(wanted) if d < len(shape) and shape[d] == 1]
    stays = [d for d in range(len(shape)) if d not in gone]

    local = Rewritten(lambda piece, x, *args: (torch.Tensor.squeeze, (x, tuple(gone))), shapes=True)
    plain = wanted == set(gone) and "dim" in call.bound
    inputs = [[None if d in gone else d for d in range(len(shape))]]
    return labelled(call, inputs, [stays], linear=[(0,)], hollow=True, local=None if plain else local)


@register("expand", "broadcast_to")
def expand(call: Call) -> Match:
    """Dims that are repeated are whole on every rank, before and after."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    new = len(after) - len(before)
    labels: list[Hashable] = [None] * len(after)
    for d, size in enumerate(before):
        if size == after[new + d]:
            labels[new + d] = d

    local = Rewritten(lambda piece, x, *args, **kwargs: (torch.Tensor.expand, (x, piece.shape())), shapes=True)
    return labelled(call, [labels[new:]], [labels], linear=[(0,)], hollow=True, local=local)


@register("expand_as")
def expand_as(call: Call) -> Match:
    """The other gives only its shape, and may itself lie in any way that gives the right one."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    new = len(after) - len(before)
    mine: list[Hashable] = [d if before[d - new] == n else None for d, n in enumerate(after) if d >= new]
    whole = range(len(after))
    return labelled(call, [mine, whole], [whole], linear=[(0,), (0, 1)], hollow=True)


@register("repeat", "tile")
def repeat(call: Call) -> Match:
    """Dims that are repeated once stay as they are. Pieces of others, one behind the other, are pieces of each copy."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    times = call.bound["repeats" if "repeats" in call.bound else "dims"]
    new = len(after) - len(before)
    times = [1] * (len(after) - len(times)) + list(times)
    labels = [d if d >= new and times[d] == 1 else None for d in range(len(after))]
    match = labelled(call, [labels[new:]], [labels], linear=[(0,)], hollow=True)
    if not call.states or 0 in after or not any(call.states[0].dims) or call.states[0].windows:
        return match
    dims = [(-n, *cut) if n > 1 and cut else cut for n, cut in zip(times[new:], call.states[0].dims, strict=True)]
    made = call.states[0]._replace(dims=(*[()] * new, *dims))
    return replace(match, also=(Way((call.states[0],), (made,)),))


@register("repeat_interleave.self_int")
def repeat_interleave(call: Call) -> Match | None:
    """The repeated dim is split where its pieces are even, for then so are the repeated ones."""
    x, dim = call.inputs[0], call.bound["dim"]
    if dim is None and x.dim() != 1:
        return None
    dim = dim or 0
    even = x.shape[dim] % max(1, _ranks(call)) == 0 and bool(call.sizes)
    labels = [d if d != dim % x.dim() or even else None for d in range(x.dim())]
    local = _without("output_size", call) if call.bound["output_size"] is not None else None
    return labelled(call, [labels], [labels], linear=[(0,)], hollow=True, local=local)


def _ranks(call: Call) -> int:
    """How many ranks there are, so that what this divides is split evenly by any axes."""
    return torch.Size(call.sizes).numel()


def _without(name: str, call: Call) -> Callable[..., Any]:
    def local(piece: Piece, *args: Any, **kwargs: Any) -> Any:
        return call.op(*args, **{key: value for key, value in kwargs.items() if key != name})

    return local


@register("diagonal", "linalg_diagonal")
def diagonal(call: Call) -> Match:
    """The two dims become one, the last; its place in them decides what it is."""
    ndim = call.inputs[0].dim()
    names = ("dim1", "dim2")
    gone = {call.bound[name] % ndim for name in names}
    stays = [d for d in range(ndim) if d not in gone]
    inputs = [[None if d in gone else d for d in range(ndim)]]
    return labelled(call, inputs, [[*stays, None]], linear=[(0,)], hollow=True)


@register("diag_embed")
def diag_embed(call: Call) -> Match:
    ndim = call.outputs[0].dim()
    new = {call.bound["dim1"] % ndim, call.bound["dim2"] % ndim}
    stays = iter(range(ndim))
    out = [None if d in new else next(stays) for d in range(ndim)]
    return labelled(call, [[*range(ndim - 2), None]], [out], linear=[(0,)], hollow=True)


@register("tril", "triu")
def triangle(call: Call) -> Match:
    """Rows and columns know their place; the matrices of a batch do not."""
    labels = [*range(call.inputs[0].dim() - 2), None, None]
    return labelled(call, [labels], [labels], linear=[(0,)], hollow=True)


@register("flip", "fliplr", "flipud")
def flip(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    dims = {"fliplr": [1], "flipud": [0]}.get(call.name, call.bound.get("dims"))
    moved = {d % ndim for d in ([dims] if isinstance(dims, int) else dims or ())}
    labels = [None if d in moved else d for d in range(ndim)]
    return labelled(call, [labels], [labels], linear=[(0,)], hollow=True)


@register("view_as_real", "view_as_real_copy")
def view_as_real(call: Call) -> Match:
    """An empty piece is no view, because torch refuses its gradient. That would have to lie in pairs too, and torch
    does not lay out one that is expanded (of a sum) and has no elements."""
    dims = range(call.inputs[0].dim())
    local = Rewritten(lambda piece, x: (call.op if prod(piece.shape()) else _pairs, (x,)), shapes=True)
    return labelled(call, [dims], [[*dims, None]], linear=[(0,)], hollow=True, local=local)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack([x.real, x.imag], -1)


@register("view_as_complex", "view_as_complex_copy")
def view_as_complex(call: Call) -> Match:
    dims = range(call.outputs[0].dim())
    return labelled(call, [[*dims, None]], [dims], linear=[(0,)], hollow=True)


@register("view.dtype")
def view_dtype(call: Call) -> Match:
    """The bits stay, so that a sum of addends does not."""
    x, y = call.inputs[0], call.outputs[0]
    last: list[Hashable] = ["last" if x.shape == y.shape else None]
    labels: list[Hashable] = [*range(x.dim() - 1), *last] if x.dim() else []
    return labelled(call, [labels], [labels], hollow=True)


@register("alias", "detach", "contiguous", "lift_fresh")
def same(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    return labelled(call, [range(ndim)], [range(ndim)], linear=[(0,)], hollow=True)


@register("broadcast_tensors")
def broadcast_tensors(call: Call) -> Match:
    """Pieces broadcast to pieces; a tensor that lacks a dim, or has it of size one, is whole."""
    whole = call.outputs[0].shape
    inputs = [aligned(x.shape, whole, range(len(whole))) for x in call.inputs]
    outputs = [range(len(whole))] * len(call.outputs)
    # Addends of one tensor leave the other results as they are, so that all must be addends.
    return labelled(call, inputs, outputs, linear=[range(len(inputs))], hollow=True)
