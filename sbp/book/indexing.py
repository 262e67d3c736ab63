"""Reading by index: embedding, gather, index_select, x[i, j].

Where the indexed dim is split, a rank looks up the indices that are its own and has zeros for the others', so that the
results of all ranks add up: a split vocabulary needs nothing sent before the sum.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Match, Piece, Rewritten
from ..rule import register
from .labels import aligned, broadcast, labelled

__all__ = ["held", "indexed", "own", "picked", "places"]


def own(index: Tensor, lo: int, hi: int, size: int) -> tuple[Tensor, Tensor]:
    """Local indices, 0 for those that other ranks hold, and which are inside of the range that this one holds.

    One that no rank holds is outside of this rank's too, so that the kernel refuses it, as it does on one device.

    >>> own(torch.tensor([0, 3, 5, 6]), 2, 4, 6)
    (tensor([0, 1, 0, 2]), tensor([False,  True, False, False]))
    """
    inside, known = (index >= lo) & (index < hi), (index >= 0) & (index < size)
    return torch.where(inside, index - lo, torch.where(known, 0, hi - lo)), inside


def held(piece: Piece, at: int, dim: int) -> tuple[int, int]:
    """Where a rank's piece of a dim lies; ranks of these rules hold one range, or nothing."""
    spans = piece.spans(at, dim)
    return spans[0] if spans else (0, 0)


def _masked(out: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside, out, torch.zeros((), dtype=out.dtype, device=out.device))


def _is_summable(x: Tensor) -> bool:
    return x.dtype != torch.bool


@register("embedding")
def embedding(call: Call) -> Match | None:
    """Rows of the table are the vocabulary."""
    bound = call.bound
    if bound["scale_grad_by_freq"] or bound["sparse"]:
        return None  # how often a word occurs is known only to all ranks together
    words = bound["weight"].shape[0]
    places = list(range(bound["indices"].dim()))

    def rewrite(
        piece: Piece, weight: Tensor, indices: Tensor, padding_idx: int = -1, *rest: bool, **more: bool
    ) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        lo, hi = held(piece, 0, 0)
        if hi - lo == words:
            return torch.embedding, (weight, indices, padding_idx)
        return _own_words, (weight, indices, lo, hi, words, padding_idx - lo if lo <= padding_idx < hi else -1)

    return labelled(
        call,
        [["words", "width"], places],
        [[*places, "width"]],
        reduced={"words": "sum"},
        linear=[(0,)],
        local=Rewritten(rewrite),
    )


def _own_words(weight: Tensor, indices: Tensor, lo: int, hi: int, words: int, padding: int) -> Tensor:
    """The rows of the words that this rank holds, zeros for others."""
    index, inside = own(indices, lo, hi, words)
    return _masked(torch.embedding(weight, index, padding), inside.unsqueeze(-1))


@register("index_select")
def index_select(call: Call) -> Match:
    x = call.inputs[0]
    dim = call.bound["dim"] % max(x.dim(), 1)
    labels: list[Hashable] = list(range(x.dim()))
    out = ["index" if d == dim else d for d in labels]
    labels = ["read" if d == dim and _is_summable(x) else None if d == dim else d for d in labels]

    def rewrite(piece: Piece, x: Tensor, dim: int, index: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        size = call.inputs[0].shape[dim]
        lo, hi = held(piece, 0, dim)
        return (torch.index_select, (x, dim, index)) if hi - lo == size else (_own_rows, (x, dim, index, lo, hi, size))

    index = ["index"] if call.inputs[1].dim() else []
    if not index:  # a single one, which leaves a dim of one row
        out = [None if d == "index" else d for d in out]
    if x.dim() == 0:
        return labelled(call, [labels, index], [out], linear=[(0,)])
    return labelled(
        call, [labels, index], [out], reduced={"read": "sum"}, linear=[(0,)], local=Rewritten(rewrite), reads=["read"]
    )


def _own_rows(x: Tensor, dim: int, index: Tensor, lo: int, hi: int, size: int) -> Tensor:
    """The rows of these numbers that this rank holds, zeros for others."""
    at, inside = own(index, lo, hi, size)
    return _masked(x.index_select(dim, at), inside.reshape([-1] + [1] * (x.dim() - 1 - dim % x.dim())))


@register("gather")
def gather(call: Call) -> Match | None:
    """Other dims are split only where index and tensor are of one size, so that their pieces meet."""
    x, index = call.inputs
    if x.dim() == 0 or index.dim() == 0 or call.bound.get("sparse_grad"):
        return None
    dim = call.bound["dim"] % x.dim()
    other: list[Hashable] = [d if x.shape[d] == index.shape[d] else None for d in range(x.dim())]
    read, picked = list(other), list(other)
    read[dim], picked[dim] = "read" if _is_summable(x) else None, "index"

    def rewrite(
        piece: Piece, x: Tensor, dim: int, index: Tensor, **more: bool
    ) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        # Elements of a dim that stays whole in a smaller index need no mask: positions are the same everywhere.
        size = call.inputs[0].shape[dim]
        lo, hi = held(piece, 0, dim)
        return (torch.gather, (x, dim, index)) if hi - lo == size else (_own_places, (x, dim, index, lo, hi, size))

    run = Rewritten(rewrite)
    return labelled(call, [read, picked], [picked], reduced={"read": "sum"}, linear=[(0,)], local=run, reads=["read"])


def _own_places(x: Tensor, dim: int, index: Tensor, lo: int, hi: int, size: int) -> Tensor:
    """The elements at these places of a dim on this rank, zeros for others."""
    at, inside = own(index, lo, hi, size)
    return _masked(x.gather(dim, at), inside)


@register("index.Tensor")
def index(call: Call) -> Match | None:
    """Indices broadcast together and stand where the first of them did, or in front if there is a dim in between."""
    x, indices = call.bound["self"], call.bound["indices"]
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None  # how much is picked depends on the values
    return labelled(
        call,
        [_read(x, indices), *places(indices)],
        [picked(x, indices)],
        reduced={("read", d): "sum" for d in range(x.dim())},
        linear=[(0,)],
        local=_index_own,
        reads=[("read", d) for d in range(x.dim())],
    )


def indexed(indices: Sequence[Tensor | None]) -> list[int]:
    return [d for d, i in enumerate(indices) if i is not None]


def _read(x: Tensor, indices: Sequence[Tensor | None]) -> list[Hashable]:
    """The labels of the tensor that is indexed."""
    here = indexed(indices)
    return [(("read", d) if _is_summable(x) else None) if d in here else d for d in range(x.dim())]


def places(indices: Sequence[Tensor | None]) -> list[list[Hashable]]:
    """The labels of the indices: of each dim of the shape that they broadcast to."""
    given = [i for i in indices if i is not None]
    whole = broadcast(*(i.shape for i in given))
    return [aligned(i.shape, whole, [("at", d) for d in range(len(whole))]) for i in given]


def picked(x: Tensor, indices: Sequence[Tensor | None]) -> list[Hashable]:
    """The labels of what is read, or written, through indices."""
    here = indexed(indices)
    ndim = max(i.dim() for i in indices if i is not None)
    together = here == list(range(here[0], here[0] + len(here)))
    first = here[0] if together else 0
    rest: list[Hashable] = [d for d in range(x.dim()) if d not in here]
    return [*rest[:first], *(("at", d) for d in range(ndim)), *rest[first:]]


def _index_own(piece: Piece, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    whole = piece.inputs[0].shape
    here, inside, ndim = indexed(indices), None, 0
    mine = list(indices)
    for d in here:
        index = mine[d]
        assert index is not None
        ndim = max(ndim, index.dim())
        lo, hi = held(piece, 0, d)
        if hi - lo < whole[d]:
            mine[d], fits = own(torch.where(index < 0, index + whole[d], index), lo, hi, whole[d])
            inside = fits if inside is None else inside & fits
    out = torch.ops.aten.index.Tensor(x, mine)
    if inside is None:
        return out  # type: ignore[no-any-return]
    together = here == list(range(here[0], here[0] + len(here)))
    after = x.dim() - len(here) - (here[0] if together else 0)
    return _masked(out, inside.reshape(*inside.shape, *[1] * after))


@register("take")
def take(call: Call) -> Match:
    """Indices run through all elements in a row, so that the tensor stays whole."""
    x, index = call.inputs
    dims = range(index.dim())
    return labelled(call, [[None] * x.dim(), dims], [dims], linear=[(0,)])


@register("embedding_bag", "embedding_bag.padding_idx")
def embedding_bag(call: Call) -> Match | None:
    """Bags begin anywhere in the indices; only the width of the table is split."""
    bound = call.bound
    if bound["sparse"]:
        return None
    inputs: list[list[Hashable]] = [[None] * x.dim() for x in call.inputs]
    outputs: list[list[Hashable]] = [[None] * y.dim() for y in call.outputs]
    inputs[0][1] = outputs[0][1] = "width"
    if outputs[3] and call.outputs[3].dim() == 2:  # of the maxima, which word each is
        outputs[3][1] = "width"
    return None if bound["per_sample_weights"] is not None else labelled(call, inputs, outputs)


@register("one_hot")
def one_hot(call: Call) -> Match | None:
    """The number of classes must be given: else it is the largest index of all."""
    if call.bound["num_classes"] < 0:
        return None
    ndim = call.inputs[0].dim()
    return labelled(call, [range(ndim)], [[*range(ndim), None]])
