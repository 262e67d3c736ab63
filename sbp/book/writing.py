"""Writing by index: index_put, index_add, scatter and their forms in place.

Dims that are not written to pass. What is *added* by index may be split, since each rank adds its share to an addend of
the tensor. What *replaces* may not, as the last of two that write to one place wins; whole, it may go into a tensor
that is split there.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..call import Call, Match, Piece
from ..rule import register
from .indexing import held, indexed, own, picked, places
from .labels import aligned, labelled

__all__: list[str] = []


@register("index_put", "index_put_", "_unsafe_index_put")
def index_put(call: Call) -> Match | None:
    x, indices, values = (call.bound[name] for name in ("self", "indices", "values"))
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return _fill_mask(call)
    here = indexed(indices)
    labels: list[Hashable] = [None if d in here else d for d in range(x.dim())]
    at, written = places(indices), picked(x, indices)
    if not call.bound["accumulate"]:
        at, written = [[None] * len(place) for place in at], [None if isinstance(w, tuple) else w for w in written]
    return _adds(call, labels, [*at, aligned(values.shape, _written_shape(x, indices), written)], written)


def _fill_mask(call: Call) -> Match | None:
    """`x[mask] = number` is of each element; with more values it depends on the mask which goes where."""
    x, indices, values = (call.bound[name] for name in ("self", "indices", "values"))
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) > 1 or values.dim() or call.bound["accumulate"]:
        return None
    [(first, mask)] = given
    dims = range(x.dim())
    return labelled(call, [dims, dims[first : first + mask.dim()], []], [dims], linear=[(0, 2)])


def _written_shape(x: Tensor, indices: Sequence[Tensor | None]) -> torch.Size:
    metas = [None if i is None else torch.empty(i.shape, dtype=i.dtype, device="meta") for i in indices]
    return torch.ops.aten.index.Tensor(torch.empty(x.shape, device="meta"), metas).shape  # type: ignore[no-any-return]


@register("index_copy")
def index_copy(call: Call) -> Match:
    """A rank writes the rows that are its own: each knows all that is written, and in which order."""
    x, source = call.inputs[0], call.bound["source"]
    dim = call.bound["dim"] % max(x.dim(), 1)
    labels: list[Hashable] = ["line" if d == dim else d for d in range(x.dim())]
    rows = [None if label == "line" else label for label in labels][: source.dim()]

    def local(piece: Piece, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        lo, hi = held(piece, 0, dim)
        size = call.inputs[0].shape[dim]
        if hi - lo == size:
            return x.index_copy(dim, index, source)
        at, inside = own(index, lo, hi, size)
        more = x.new_zeros([1 if d == dim % x.dim() else n for d, n in enumerate(x.shape)])  # for all that is not here
        at = torch.where(inside, at, torch.where(at == hi - lo, hi - lo + 1, hi - lo))
        return torch.cat([x, more], dim).index_copy(dim, at, source).narrow(dim, 0, hi - lo)

    if x.dim() == 0:
        return index_add(call)
    inputs: list[list[Hashable]] = [labels, [None] * call.bound["index"].dim(), rows]
    return labelled(call, inputs, [labels], linear=[(0, 2)], local=local, reads=["line"])


@register("index_add", "index_add_", "index_copy_")
def index_add(call: Call) -> Match:
    x, dim = call.inputs[0], call.bound["dim"] % max(call.inputs[0].dim(), 1)
    labels: list[Hashable] = [None if d == dim else d for d in range(x.dim())]
    line: list[Hashable] = [("at", 0)] if call.name.startswith("index_add") else [None]
    source = labels[:dim] + line + labels[dim + 1 :]
    shape = call.bound["source"].shape
    return _adds(call, labels, [line[: call.bound["index"].dim()], source[: len(shape)]], line)


@register("scatter_add", "scatter_add_", "scatter.src", "scatter_.src", "scatter_reduce.two", "scatter_reduce_.two")
def scatter(call: Call) -> Match | None:
    """Other dims are split only where all three are of one size, so that their pieces meet."""
    x, index, src = call.inputs
    if x.dim() == 0 or index.dim() == 0 or src.dim() == 0:
        return None
    dim = call.bound["dim"] % x.dim()
    labels = [d if d != dim and x.shape[d] == index.shape[d] == src.shape[d] else None for d in range(x.dim())]  # type: list[Hashable]
    reduce = call.bound.get("reduce", "sum" if call.name.startswith("scatter_add") else "")
    line: list[Hashable] = [None]
    if reduce == "sum" and call.bound.get("include_self", True) and index.shape[dim] == src.shape[dim]:
        line = [("at", 0)]
    parts = labels[:dim] + line + labels[dim + 1 :]
    if reduce in ("sum", ""):
        return _adds(call, labels, [parts, parts], line)
    return labelled(call, [labels, parts, parts], [labels])


def _adds(call: Call, labels: list[Hashable], others: list[list[Hashable]], line: Sequence[Hashable]) -> Match:
    """The factors of a tensor and, as the last of the others, of what is put into it."""
    return labelled(
        call,
        [labels, *others],
        [labels],
        reduced={label: "sum" for label in line if isinstance(label, tuple)},
        addends=(0,),
        linear=[(0, len(others))],
    )


@register("scatter.value", "scatter_.value", "scatter.reduce", "scatter.value_reduce")
def scatter_value(call: Call) -> Match | None:
    x, index, *src = call.inputs
    if x.dim() == 0 or index.dim() == 0:
        return None
    dim = call.bound["dim"] % x.dim()
    same = [all(t.shape[d] == x.shape[d] for t in (index, *src)) for d in range(x.dim())]
    labels: list[Hashable] = [d if d != dim and same[d] else None for d in range(x.dim())]
    return labelled(call, [labels] * len(call.inputs), [labels])


@register("index_fill.int_Scalar", "index_fill_.int_Scalar", "index_fill.int_Tensor", "index_fill_.int_Tensor")
def index_fill(call: Call) -> Match:
    x, dim = call.inputs[0], call.bound["dim"] % max(call.inputs[0].dim(), 1)
    labels: list[Hashable] = [None if d == dim else d for d in range(x.dim())]
    rest = [[None] * t.dim() for t in call.inputs[1:]]
    linear = [(0, 2)] if len(rest) == 2 else []
    return labelled(call, [labels, *rest], [labels], linear=linear)
