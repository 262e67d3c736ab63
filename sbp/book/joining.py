"""Tensors joined to one, and one taken apart: the dim along which that happens stays whole, all others pass.

Equal parts of a dim that is cut within each part, such as heads of packed q, k and v, keep this cut.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..call import Call, Match, Piece, Rewritten, Way
from ..rule import register
from ..state import State
from .labels import labelled
from .views import carried

__all__: list[str] = []


@register("cat", "concat", "concatenate")
def cat(call: Call) -> Match:
    """Addends of one part leave the others as they are, so that all must be addends."""
    ndim = call.outputs[0].dim()
    dim = call.bound["dim"] % ndim
    labels: list[Hashable] = [None if d == dim else d for d in range(ndim)]
    # An empty tensor of one dim may stand among others of any number of dims.
    inputs = [labels if x.dim() == ndim else [None] for x in call.inputs]
    return labelled(call, inputs, [labels], linear=[range(len(inputs))], hollow=True)


@register("stack")
def stack(call: Call) -> Match:
    ndim = call.outputs[0].dim()
    dim = call.bound["dim"] % ndim
    labels: list[Hashable] = [None if d == dim else d for d in range(ndim)]
    part = labels[:dim] + labels[dim + 1 :]
    count = len(call.inputs)
    return labelled(call, [part] * count, [labels], linear=[range(count)], hollow=True)


@register("hstack", "vstack", "dstack", "column_stack", "row_stack")
def grow(call: Call) -> Match | None:
    """As `cat` along the first dim for rows, the second for columns, the third in depth; only where dims stay."""
    ndim = call.outputs[0].dim()
    dim = {"vstack": 0, "row_stack": 0, "dstack": 2}.get(call.name, min(1, ndim - 1))
    if any(x.dim() != ndim for x in call.inputs):
        return None
    labels = [None if d == dim else d for d in range(ndim)]
    return labelled(call, [labels] * len(call.inputs), [labels], linear=[range(len(call.inputs))], hollow=True)


@register(
    "split.Tensor", "split.sizes", "split_with_sizes", "chunk", "unsafe_split.Tensor", "unsafe_split_with_sizes",
    "unsafe_chunk", "tensor_split.sections", "tensor_split.indices", "unbind.int",
)  # fmt: skip
def split(call: Call) -> Match:
    ndim = call.inputs[0].dim()
    dim = call.bound["dim"] % ndim
    labels: list[Hashable] = [None if d == dim else d for d in range(ndim)]
    out = labels[:dim] + labels[dim + 1 :] if call.name == "unbind.int" else labels
    match = labelled(call, [labels], [out] * len(call.outputs), linear=[(0,)], hollow=True)
    return replace(match, also=_within_parts(call, dim)) if call.states and call.name != "unbind.int" else match


def _within_parts(call: Call, dim: int) -> tuple[Way, ...]:
    """The way in which a cut inside each of the equal parts stays."""
    state, shape, parts = call.states[0], tuple(call.inputs[0].shape), len(call.outputs)
    uneven = len({y.shape[dim] for y in call.outputs}) > 1
    if not state.dims[dim] or parts < 2 or uneven or 0 in shape:  # of nothing, `carried` drops the cut
        return ()
    apart = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    dims = carried(shape, apart, state.dims, call.sizes)
    if dims is None or dims[dim]:
        return ()
    out = State((*dims[:dim], *dims[dim + 1 :]), state.partial, state.reduction)
    local = Rewritten(lambda piece, x, *args, **kwargs: (torch.chunk, (x, parts, dim)), shapes=True)
    return (Way((state,), (out,) * parts, local),)


@register("meshgrid", "meshgrid.indexing")
def meshgrid(call: Call) -> Match:
    """Each tensor runs along a dim of its own."""
    count = len(call.inputs)
    out = list(range(count))
    if call.bound.get("indexing") == "xy" and count > 1:
        out[:2] = [1, 0]
    inputs = [[at] if x.dim() else [] for at, x in enumerate(call.inputs)]
    outs: list[Hashable] = [at if call.inputs[at].dim() else None for at in out]
    return labelled(call, inputs, [outs] * count, linear=[range(count)], hollow=True)


@register("sbpflow::cut_pieces", "sbpflow::joined_pieces")
def pieces(call: Call) -> Match:
    """All other dims may be split, and places do not matter: linear in everything."""
    dim = call.bound["dim"] % call.inputs[0].ndim
    labels: list[Hashable] = [None if d == dim else d for d in range(call.inputs[0].ndim)]
    linear = [tuple(range(len(call.inputs)))]
    local = Rewritten(partial(_own_blocks, call.op, dim))
    inputs, outputs = [labels for _ in call.inputs], [labels for _ in call.outputs]
    return labelled(call, inputs, outputs, linear=linear, hollow=True, local=local)


def _own_blocks(op: Any, dim: int, piece: Piece, *args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A rank that has not the whole dim has one block."""
    *others, blocks = args
    whole = piece.spans(0, dim) == ((0, piece.inputs[0].shape[dim]),)
    return op, (*others, blocks if whole else 1)
